"""Checks of all that a method returns to the engine: names, shapes, dtypes and devices.

Values are not read, so nothing waits for a GPU. There are three exceptions in the first rounds: whether clients and
server have the same tracked model, whether clients need something that they do not keep while they are absent, and
whether the shared model depends on the cohort.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from itertools import count, pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.criterion import FeatureLoss, Leaf, splitter, tensors_inside
from pfedlms.errors import MethodError, PfedlmsError
from pfedlms.methods.contract import Exchange, Method, Objective, PerClient, Tracked
from pfedlms.wire.fields import Message

_NEARLY = 0.85  # how alike names are of which one is taken for a misspelling of the other
_COMPARED_ROUNDS = 3  # the first rounds, in which every client's tracked model is compared with the server's

_HOST = torch.device("cpu")
_DTYPES = {np.float32: torch.float32, np.uint8: torch.uint8, np.bool_: torch.bool, np.int64: torch.int64}

Check = Callable[[Callable[..., Any], tuple[Any, ...], Any], None]
"""Checks what a function of a method returned, given the function of its first argument alone, all its arguments, and
the result."""


def guard_method(method: Method, weights: str = "samples") -> Method:
    """The method, changed so that its functions and exchanges check what they return; `weights` is `train.weights`."""
    with name_method_in_errors(method):
        refuse_misspelt(type(method), Method, Tracked)
        if not hasattr(method, "task"):
            raise MethodError("got no task, expected one of every method; call super().__init__(task, settings)")
        for exchange in method.exchanges:
            refuse_misspelt(type(exchange), Exchange)
    for name, check in {**_CHECKS, "global_model": _once(_check_shared)}.items():
        _guard(method, method, name, check)
    method.exchanges = tuple(map(copy, method.exchanges))  # a class or a module may hold one for several methods
    for index, exchange in enumerate(method.exchanges):
        for name, kind in (("up", 2 * index), ("down", 2 * index + 1)):
            message = getattr(exchange, name, None)
            if not isinstance(message, Message) or message.kind != kind:
                got = f"kind {message.kind}" if isinstance(message, Message) else _describe(message)
                error = MethodError(f"got {got}, expected Message({kind}, fields)")
                raise error.of(method.name, f"{type(exchange).__name__}.{name}")
        if weights == "uniform":
            _count_clients_alike(exchange)
        if index == 0:
            _end_round_values(exchange)
        checks = _ExchangeChecks(method, exchange, index == len(method.exchanges) - 1)
        _guard(method, exchange, "client_send", checks.check_send)
        _guard(method, exchange, "in_step", unchanged=0)
        _guard(method, exchange, "server_open")
        _guard(method, exchange, "server_add", _check_total, unchanged=0)
        _guard(method, exchange, "server_reply", checks.check_reply)
        _guard(method, exchange, "client_receive", checks.check_receive, unchanged=2)
    return method


def _guard(method: Method, owner: Any, name: str, check: Check | None = None, unchanged: int = 1) -> None:
    """Change a function of the method, or of an exchange of it, so that its result is checked. It may not write into
    its first arguments, `unchanged` of them, nor into w⁰."""
    call = getattr(owner, name)
    initial = {"task.initial": method.task.initial}
    where = name if owner is method else f"{type(owner).__name__}.{name}"

    def guarded_call(*given: Any) -> Any:
        with name_method_in_errors(method, where), _left_unchanged(*_held(*given[:unchanged]), initial):
            result = call(*given)
            if check is not None:
                check(lambda first: call(first, *given[1:]), given, result)
            return result

    object.__setattr__(owner, name, guarded_call)  # also of a frozen dataclass


def _count_clients_alike(exchange: Exchange[Any]) -> None:
    """Let the server's sum take 1 for every N_k."""
    add = exchange.server_add
    object.__setattr__(
        exchange, "server_add", lambda total, ids, samples, values: add(total, ids, [1] * len(ids), values)
    )


class _EndedValues(dict[str, Tensor]):
    """`scratch` or `heard` in the first `client_send` of a round: those of the round before have ended. A default in
    place of one would be silently wrong, so `get` has none."""

    def __missing__(self, name: str) -> Tensor:
        raise MethodError(f"got {name!r} of the round before; scratch and heard end with their round, state does not")

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _end_round_values(exchange: Exchange[Any]) -> None:
    """Let `client_send` raise an error where it asks for a value of the round before."""
    send = exchange.client_send

    def send_without_last_round(cohort: Cohort, *others: Any) -> tuple[Cohort, Tensors]:
        after, values = send(replace(cohort, scratch=_EndedValues(), heard=_EndedValues()), *others)
        parts = ("scratch", "heard") if isinstance(after, Cohort) else ()
        plain: Any = {part: {} for part in parts if isinstance(getattr(after, part), _EndedValues)}
        return replace(after, **plain) if plain else after, values

    object.__setattr__(exchange, "client_send", send_without_last_round)


@cache
def refuse_misspelt(kind: type, *bases: type) -> None:
    """Refuse a name in a class outside this package that its functions do not use and that is nearly one of the
    contract's, which `bases` declare: it would never be called."""
    known = {name for base in bases for name in (*dir(base), *base.__annotations__)} - set(dir(object))
    own = [part for each in kind.__mro__ if not each.__module__.startswith("pfedlms.") for part in vars(each).items()]
    used = {name for _, value in own if isinstance(value, FunctionType) for name in value.__code__.co_names}
    for name in (name for name, _ in own if not name.startswith("_") and name not in known | used):
        if near := get_close_matches(name, known, 1, _NEARLY):
            raise MethodError(f"`{kind.__name__}.{name}` is never read (did you mean `{near[0]}`?); rename it")


@contextmanager
def name_method_in_errors(method: Method, function: str = "") -> Iterator[None]:
    """Within it errors get the name of the method, and of its function if one is given."""
    try:
        yield
    except MethodError as error:
        raise error.of(method.name, function) from error.__cause__
    except PfedlmsError:
        raise
    except Exception as error:  # a method of the user's own may raise anything
        if not function:
            raise
        raise MethodError(f"raised {type(error).__name__}: {error}").of(method.name, function) from error


@contextmanager
def _left_unchanged(*given: Tensors, where: str = "") -> Iterator[None]:
    """Within it nothing may write into these dicts, nor into the tensors in them."""
    before = [(values, {name: (value, value._version) for name, value in values.items()}) for values in given]
    yield
    for values, known in before:
        same = values.keys() == known.keys() and all(values[name] is tensor for name, (tensor, _) in known.items())
        if not same or any(tensor._version != version for tensor, version in known.values()):
            raise MethodError(
                f"{where}writes into a tensor or a dict that it was given; return new ones: a + b, "
                "cohort.with_state(name=tensor), {**server, name: tensor}"
            )


def _held(*given: Cohort | Tensors) -> Iterator[Tensors]:
    """All tensors of these arguments."""
    for value in given:
        if isinstance(value, Cohort):
            yield {"params": value.params, "momentum": value.momentum}
            yield from (value.buffers, value.state, value.scratch, value.heard)
        else:
            yield value


def _tensors_of(objective: Objective) -> Tensors:
    """The tensors of an objective's fields, by path."""
    leaves = tensors_inside(objective).items()
    return {path: leaf.value if isinstance(leaf, PerClient) else leaf for path, leaf in leaves}


def leaves_unchanged(objective: Objective) -> AbstractContextManager[None]:
    """A context in which an objective may not write into the tensors of its fields: they are the clients' state."""
    return _left_unchanged(_tensors_of(objective), where=f"{type(objective).__name__}: ")


def _once(check: Check) -> Check:
    """The check, made in the first call only, because it reads values."""
    calls = count()
    return lambda *arguments: check(*arguments) if next(calls) == 0 else None


class _ExchangeChecks:
    """Checks of what the functions of an exchange return."""

    def __init__(self, method: Method, exchange: Exchange[Any], is_last: bool) -> None:
        self._method, self._exchange, self._is_last = method, exchange, is_last
        self._models_of_reply: tuple[int, Tensor, Tensor] | None = None
        """The round of the last reply, and the tracked model before and after it."""
        self._absence_checked: set[str] = set()

    def check_send(self, call: Callable[[Cohort], Any], given: tuple[Any, ...], result: Any) -> None:
        cohort, (after, values) = given[0], result
        check_same_clients(cohort, after)
        _expect_message(self._exchange.up, values, len(cohort.ids))
        if not self._method.about_last_steps:
            self._check_absence("send", cohort, lambda one: call(one)[1])

    def check_reply(self, call: Callable[[Tensors], Any], given: tuple[Any, ...], result: Any) -> None:
        (server, _, round), (after, values) = given, result
        _expect_same("state", server, after)
        _expect_message(self._exchange.down, values)
        if isinstance(self._method, Tracked) or self._method.tracks:
            self._models_of_reply = round, server["model"], after["model"]

    def check_receive(self, call: Callable[[Cohort], Cohort], given: tuple[Any, ...], after: Cohort) -> None:
        cohort, _, round = given
        check_same_clients(cohort, after)
        if self._models_of_reply is not None and self._models_of_reply[0] == round < _COMPARED_ROUNDS:
            _check_tracked(cohort, after, *self._models_of_reply[1:])
        if self._is_last:
            self._check_absence("receive", cohort, lambda one: _results(call(one)))

    def _check_absence(self, what: str, cohort: Cohort, call: Callable[[Cohort], Tensors]) -> None:
        """Refuse a function whose results depend on what a client does not keep while it is absent; checked once."""
        if what in self._absence_checked:
            return
        self._absence_checked.add(what)
        client = cohort.rows(slice(0, 1))
        lost, without = _without_dropped(client, self._method.client_rest(client))
        if lost and not _same_results(call, client, without):
            steps = "If messages are about the steps that a client has just taken, set about_last_steps = True. "
            raise MethodError(
                f"uses {' or '.join(lost)}, which clients do not keep while they are absent (see client_rest). "
                f"{steps * (what == 'send')}If answers are changes of a model that all clients hold, derive the method "
                "from Tracked and leave `tracks` true; else take the model from the answer (go_on_from, "
                "cohort.with_model)"
            )


def _check_tracked(before: Cohort, cohort: Cohort, old: Tensor, model: Tensor) -> None:
    """Refuse a client that had the server's model before an answer and has another one after it. A client that had
    another one before was out of sync already."""
    device = cohort.params.device
    same_before = (before.state["model"] == old.to(device)).all(dim=1)
    fine = (~same_before | (cohort.state["model"] == model.to(device)).all(dim=1)).tolist()
    if not all(fine):
        raise MethodError(
            f'got a state["model"] of client {cohort.ids[fine.index(False)]} that is not the server\'s model, '
            "expected the same bits; both ends must compute it by the same operations on the same float32 values: "
            "those that the answer carries, and the model before it"
        )


def _without_dropped(client: Cohort, at_rest: Cohort) -> tuple[list[str], Cohort]:
    """The names of what a client does not keep while it is absent, and the client with NaN in its place (77 for
    integers), so that a computation which uses it is found out."""
    lost = {name: value for name, value in client.state.items() if name not in at_rest.state}
    names = [f'state["{name}"]' for name in lost]
    without = client.with_state(**{name: _spoilt(value) for name, value in lost.items()})
    if client.params.shape[1] and not at_rest.params.shape[1]:
        names, without = ["cohort.params", *names], replace(without, params=_spoilt(client.params))
    return names, without


def _spoilt(value: Tensor) -> Tensor:
    return torch.full_like(value, torch.nan if value.is_floating_point() else 77)


def _results(cohort: Cohort) -> Tensors:
    return {"params": cohort.params, **cohort.state, **{f"heard.{name}": value for name, value in cohort.heard.items()}}


def _same_results(call: Callable[[Cohort], Tensors], one: Cohort, other: Cohort) -> bool:
    expected = call(one)
    try:
        results = call(other)
    except Exception:  # a method may refuse NaN in its own way
        return False
    return all(torch.equal(value, results[name]) for name, value in expected.items())


# --- clients ----------------------------------------------------------------------------------------------------------


def check_same_clients(before: Cohort, after: Cohort) -> None:
    """Refuse a cohort that has other clients, or tensors of other names, shapes, dtypes or devices."""
    _expect_cohort(after)
    if after is before:
        return
    if (after.ids, after.samples) != (before.ids, before.samples):
        raise MethodError(f"got clients {after.ids}, expected {before.ids}; keep `ids` and `samples`")
    _expect_same("buffers", before.buffers, after.buffers)
    _expect_same("state", before.state, after.state)
    for name in ("params", "momentum"):
        _expect_like(name, getattr(after, name), getattr(before, name))
    _check_rows("scratch", after.scratch, after)


def _check_total(call: Callable[..., Any], given: tuple[Any, ...], total: Any) -> None:
    if total is None and given[0] is not None:
        raise MethodError("got a NoneType, expected the total with these messages; return it")


def _check_start(call: Callable[..., Any], given: tuple[Any, ...], cohort: Cohort) -> None:
    _expect_cohort(cohort)
    _check_rows("state", cohort.state, cohort)


def _expect_cohort(value: Any) -> None:
    if not isinstance(value, Cohort):
        raise MethodError(f"got {_describe(value)}, expected a Cohort")


def _check_rows(what: str, values: Tensors, cohort: Cohort) -> None:
    for name, value in values.items():
        _expect_rows(f'{what}["{name}"]', value, cohort)


def _check_shared(call: Callable[..., Any], given: tuple[Any, ...], model: Tensor | None) -> None:
    """Check what `global_model` returns: the last client must have the model of the first, and the first one the same
    without the others."""
    if model is None:
        return
    (cohort,) = given
    clients, dim = cohort.params.shape
    models = model.expand(clients, dim)
    if clients > 1:
        (first, *_, last), alone = models, call(cohort.rows(slice(0, 1))).expand(1, dim)[0]
        if not all(torch.allclose(first, other, equal_nan=True) for other in (last, alone)):
            raise MethodError(
                "got other models for other clients or cohorts, expected one that all clients share, or None; means "
                "over clients belong to the server"
            )


def _check_rest(call: Callable[..., Any], given: tuple[Any, ...], after: Cohort) -> None:
    """Check what `client_rest` returns: it may drop entries, and must not change others."""
    (before,) = given
    _expect_cohort(after)
    _expect_same("state", {name: value for name, value in before.state.items() if name in after.state}, after.state)
    if after.params.shape not in (before.params.shape, (len(before.ids), 0)):
        raise MethodError(f"got params {_describe(after.params)}, expected them unchanged or cohort.without_model()")


def _check_server_start(call: Callable[..., Any], given: tuple[Any, ...], server: Any) -> None:
    for name, value in server.items() if isinstance(server, dict) else [("result", server)]:
        if not isinstance(value, Tensor):
            raise MethodError(
                f"{name}: got {_describe(value)}, expected a dict of tensors; torch.tensor(n) holds a number"
            )


_CHECKS: dict[str, Check] = {
    "client_start": _check_start,
    "server_start": _check_server_start,
    "client_rest": _check_rest,
    "objective": lambda call, given, objective: check_objective(objective, given[0], call),
    "after_training": lambda call, given, after: check_same_clients(given[0], after),
}


# --- objectives -------------------------------------------------------------------------------------------------------


def check_objective(objective: Objective, cohort: Cohort, remake: Callable[[Cohort], Objective] | None = None) -> None:
    """Refuse an objective with a tensor that has one row for each client and is not marked PerClient.

    A tensor may have as many rows by accident (ten classes, ten clients). Then it is in `cohort.heard`, or it has the
    same shape in the objective that `remake` makes for one client alone. A cohort of one client needs no marks.
    """
    if not isinstance(objective, Objective):
        raise MethodError(f"got {_describe(objective)}, expected an Objective")
    kind = type(objective)
    refuse_misspelt(kind, Objective)  # type: ignore[arg-type]  # a class can be hashed, whatever its objects can
    defined = _defined_by(kind)
    if kind is not Objective and not defined:
        raise MethodError(f"{kind.__name__} changes nothing; define gradient, loss or after_step")
    if "loss" in defined and not objective.needs_features:
        raise MethodError(f"{kind.__name__}.loss would never be called; set needs_features = True beside it")
    clients, shared, name = len(cohort.ids), {id(value) for value in cohort.heard.values()}, type(objective).__name__
    alone: dict[str, Leaf] | None = None
    for path, leaf in tensors_inside(objective).items():
        if isinstance(leaf, PerClient):
            _expect_rows(f"{name}.{path}", leaf.value, cohort)
        elif leaf.shape[:1] == (clients,) and clients > 1 and id(leaf) not in shared:
            if remake is not None:
                alone = tensors_inside(remake(cohort.rows(slice(0, 1)))) if alone is None else alone
                if not isinstance(same := alone.get(path), Tensor) or same.shape == leaf.shape:
                    continue
            raise MethodError(
                f"{name}.{path}: got {_describe(leaf)} with one row for each client; pass PerClient(tensor) and read "
                f"self.{path}.value, or cohort.with_heard if all clients share it"
            )


def _defined_by(kind: type[Objective]) -> list[str]:
    """The functions of an objective that its class defines."""
    return [name for name in ("gradient", "loss", "after_step") if getattr(kind, name) is not getattr(Objective, name)]


@cache
def _returns_nothing(function: Any) -> bool:
    """Whether a function has no `return` with a value; one that returns None in some cases has."""
    if not isinstance(function, FunctionType):
        return False
    steps = [(step.opname, step.argval) for step in dis.get_instructions(function)]
    ends = [before if step[0] == "RETURN_VALUE" else step for before, step in pairwise(steps) if "RETURN" in step[0]]
    return all(name in ("LOAD_CONST", "RETURN_CONST") and value is None for name, value in ends)


def objective_gradient(objective: Objective, params: Tensor) -> Tensor | None:
    """`objective.gradient(params)`, checked, and contiguous, as kernels read it."""
    where = f"{type(objective).__name__}.gradient"
    try:
        with _left_unchanged({"params": params}, where=f"{where}: "):
            gradient = objective.gradient(params)
    except torch.OutOfMemoryError:  # which marks would not help
        raise
    except RuntimeError as error:  # of torch; some rows of the cohort may come at a time
        raise MethodError(f"{where}: raised {error}; what has a row for each client is PerClient(tensor)") from error
    if gradient is None:
        if _defined_by(type(objective)) == ["gradient"] and _returns_nothing(type(objective).gradient):
            raise MethodError(f"{where}: got a NoneType, so this objective changes nothing; return the gradient")
        return None
    _expect_like(where, gradient, params)
    return gradient.contiguous()


def objective_after_step(objective: Objective, params: Tensor, step: int) -> Tensor:
    """`objective.after_step(params, step)`, checked, in memory that the next step may write into."""
    after = objective.after_step(params, step)
    if after is params:
        return params
    _expect_like(f"{type(objective).__name__}.after_step", after, params)
    memory = after.untyped_storage().data_ptr()
    shares_memory = any(own.untyped_storage().data_ptr() == memory for own in _tensors_of(objective).values())
    return after.clone() if shares_memory else after.contiguous()


def objective_feature_loss(objective: Objective) -> FeatureLoss:
    """A function that returns `objective.loss(features, labels)` of some rows of the cohort, checked."""
    objective_of = splitter(objective)

    def feature_loss(rows: slice, features: Tensor, labels: Tensor) -> Tensor:
        loss = objective_of(rows).loss(features, labels)
        _expect(f"{type(objective).__name__}.loss", loss, features.shape[:1], features.dtype, features.device)
        return loss

    return feature_loss


# --- tensors ----------------------------------------------------------------------------------------------------------


def _expect(where: str, value: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse all but a tensor of this shape and dtype on this device."""
    fits = isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)
    if not fits or (value.dtype, value.device) != (dtype, device):
        raise MethodError(f"{where}: got {_describe(value)}, expected {dtype} of shape {list(shape)} on {device}")


def _expect_like(where: str, value: Any, like: Tensor) -> None:
    _expect(where, value, like.shape, like.dtype, like.device)


def _expect_rows(where: str, value: Any, cohort: Cohort) -> None:
    clients, device = len(cohort.ids), cohort.params.device
    if not isinstance(value, Tensor) or value.shape[:1] != (clients,) or value.device != device:
        raise MethodError(
            f"{where}: got {_describe(value)}, expected a tensor of shape [{clients}, …] on {device}, one row for each "
            "client of the cohort"
        )


def _expect_same(what: str, before: Tensors, after: Tensors) -> None:
    """Refuse tensors of other names, shapes, dtypes or devices than before."""
    if after.keys() != before.keys():
        raise MethodError(
            f"{what}: got the entries {sorted(after)}, expected {sorted(before)}; make every entry in client_start or "
            "server_start, with zeros for instance"
        )
    for name, value in after.items():
        _expect_like(f"{what}: {name}", value, before[name])


def _expect_message(message: Message, values: Tensors, *rows: int) -> None:
    """Refuse values of a message that are not one tensor for each declared field."""
    names = [part.name for part in message.fields]
    if sorted(values) != sorted(names):
        raise MethodError(f"got values for {sorted(values)}, expected the message's fields {sorted(names)}")
    for part in message.fields:
        value, shape = values[part.name], (*rows, *part.shape)
        _expect(f"field {part.name!r}", value, shape, _DTYPES[part.dtype], getattr(value, "device", _HOST))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"
