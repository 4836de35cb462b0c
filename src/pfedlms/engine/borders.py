"""What a method returns is checked where the engine takes it: names, shapes, dtypes and devices.

Values are not looked at, so nothing waits for a GPU, with two exceptions in the first rounds: whether clients and
server have the same tracked model, and whether clients need something that they do not keep while they are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.objectives import leaves
from pfedlms.errors import MethodError, PfedlmsError
from pfedlms.methods.contract import ClientWork, Exchange, Method, Objective, PerClient, Tracked
from pfedlms.wire.fields import Message

_COMPARED_ROUNDS = 3  # in which every client's tracked model is compared with the server's

_HOST = torch.device("cpu")
_DTYPES = {np.float32: torch.float32, np.uint8: torch.uint8, np.bool_: torch.bool, np.int64: torch.int64}


def guarded(method: Method, weights: str = "samples") -> Method:
    """The method, with exchanges that check what it returns; `weights` is `train.weights`."""
    with named(method, "server_start"):
        server = method.server_start()
        _expect_tensors("server_start", server)
        if method.tracks and "model" not in server:
            raise MethodError(
                'server_start: got no "model", expected w, because `tracks` is true; derive the method from Tracked'
            )
    for name in ("client_start", "client_rest", "objective", "after_training", "global_model"):
        setattr(method, name, _naming(method, name))
    last = len(method.exchanges) - 1
    method.exchanges = tuple(
        GuardedExchange(method, each, index == last, weights) for index, each in enumerate(method.exchanges)
    )
    return method


@contextmanager
def named(method: Method, function: str = "") -> Iterator[None]:
    """Errors within it name the method, and the function of the method where one is given."""
    try:
        yield
    except MethodError as error:
        raise error.of(method.name) from error.__cause__
    except PfedlmsError:
        raise
    except Exception as error:  # a method of the user's own may raise anything
        if not function:
            raise
        raise MethodError(f"{function}: raised {type(error).__name__}: {error}").of(method.name) from error


def _naming(method: Method, function: str) -> Callable[..., Any]:
    """A function of a method whose errors name it."""
    call = getattr(method, function)

    def named_call(*arguments: Any) -> Any:
        with named(method, function):
            return call(*arguments)

    return named_call


class GuardedExchange(Exchange[Any]):
    """An exchange of a method; all that its functions return is checked."""

    def __init__(self, method: Method, exchange: Exchange[Any], is_last: bool, weights: str) -> None:
        self._method, self._exchange, self._is_last, self._weights = method, exchange, is_last, weights
        self._name = exchange.__class__.__name__
        self.up, self.down = exchange.up, exchange.down
        self._replied: tuple[int, Tensor, Tensor] | None = None
        self._sending_tried = self._receiving_tried = False

    # Code that knows a method's own exchange finds it here, by its class and its attributes.
    __class__ = property(lambda self: type(self._exchange))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_exchange"], name)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        where = f"{self._name}.client_send"
        with named(self._method, where):
            check_cohort(cohort)
            after, values = _pair(where, self._exchange.client_send(cohort, round, work), "(cohort, values)")
            check_same_clients(where, cohort, after)
            _expect_message(where, self.up, values, (len(cohort.ids),), {cohort.params.device, _HOST})
            if not self._sending_tried and not self._method.about_last_steps:
                self._sending_tried = True
                self._check_absence(where, cohort, lambda one: self._exchange.client_send(one, round, work)[1])
            return after, values

    def in_step(self, server: Tensors, values: Tensors) -> list[bool]:
        where = f"{self._name}.in_step"
        with named(self._method, where):
            alike, senders = self._exchange.in_step(server, values), len(next(iter(values.values())))
            if len(alike) != senders:
                raise MethodError(f"{where}: got {len(alike)} answers, expected one for each of {senders}")
            return alike

    def server_open(self, server: Tensors, round: int) -> Any:
        with named(self._method, f"{self._name}.server_open"):
            return self._exchange.server_open(server, round)

    def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
        own = [1] * len(ids) if self._weights == "uniform" else samples
        with named(self._method, f"{self._name}.server_add"):
            return self._exchange.server_add(total, ids, own, values)

    def server_reply(self, server: Tensors, total: Any, round: int) -> tuple[Tensors, Tensors]:
        where = f"{self._name}.server_reply"
        with named(self._method, where):
            after, values = _pair(
                where, self._exchange.server_reply(server, total, round), "(the server's state, values)"
            )
            _expect_same(f"{where}: state", server, after, "server_start")
            _expect_message(where, self.down, values, (), None)
        if isinstance(self._method, Tracked) or self._method.tracks:
            self._replied = round, server["model"], after["model"]
        return after, values

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        where = f"{self._name}.client_receive"
        with named(self._method, where):
            after = self._exchange.client_receive(cohort, values, round)
            check_same_clients(where, cohort, after)
            if self._replied is not None and self._replied[0] == round < _COMPARED_ROUNDS:
                self._check_tracked(where, cohort, after, *self._replied[1:])
            if self._is_last and not self._receiving_tried:
                self._receiving_tried = True
                self._check_absence(
                    where, cohort, lambda one: _results(self._exchange.client_receive(one, values, round))
                )
        return after

    def _check_absence(self, where: str, cohort: Cohort, call: Callable[[Cohort], Tensors]) -> None:
        """Refuse a call whose results depend on what a client does not keep while it is absent."""
        one = cohort.rows(slice(0, 1))
        lost = dict(_without_kept(one, self._method.client_rest(one)))
        expected = call(one) if lost else {}
        for name, without in lost.items():
            if not _give_same(call, without, expected):
                raise MethodError(
                    f"{where}: uses {name}, which clients do not keep while they are absent (see client_rest), so a "
                    "client that comes back would compute with w⁰ in its place. If answers are changes of a model that "
                    "all clients hold, derive the method from Tracked and leave `tracks` true: absent clients are then "
                    'sent what they missed, and state["model"] is w; else use the answer and what client_rest keeps'
                )

    def _check_tracked(self, where: str, before: Cohort, cohort: Cohort, old: Tensor, model: Tensor) -> None:
        """Clients that had the server's model before an answer must have it after. Others were out of sync already."""
        if "model" not in cohort.state:
            raise MethodError(f'{where}: got no state["model"], expected w there, because the method is Tracked')
        device = cohort.params.device
        was = (before.state["model"] == old.to(device)).all(dim=1)
        alike = (~was | (cohort.state["model"] == model.to(device)).all(dim=1)).tolist()
        if not all(alike):
            raise MethodError(
                f'{where}: got a state["model"] of client {cohort.ids[alike.index(False)]} that is not the server\'s '
                "model, expected the same bits; both ends must compute it by the same operations on the same float32 "
                "values: those that the answer carries, and the model before it"
            )


# --- clients ----------------------------------------------------------------------------------------------------------


def check_cohort(cohort: Cohort) -> None:
    """Refuse state that has not one row for each client."""
    clients, device = len(cohort.ids), cohort.params.device
    for name, value in cohort.state.items():
        _expect_rows(f'client_start: state["{name}"]', value, clients, device)


def check_same_clients(where: str, before: Cohort, after: Cohort) -> None:
    """Refuse a cohort that is not of the same clients with the same tensors, entries aside."""
    if not isinstance(after, Cohort):
        raise MethodError(f"{where}: got {_described(after)}, expected a Cohort")
    if after is before:
        return
    if (after.ids, after.samples) != (before.ids, before.samples):
        raise MethodError(f"{where}: got clients {after.ids}, expected {before.ids}; keep `ids` and `samples`")
    for name in ("params", "momentum"):
        _expect_same(where, {name: getattr(before, name)}, {name: getattr(after, name)}, "")
    _expect_same(f"{where}: buffers", before.buffers, after.buffers, "the model")
    _expect_same(f"{where}: state", before.state, after.state, "client_start")
    clients, device = len(after.ids), after.params.device
    for name, value in after.scratch.items():
        _expect_rows(f'{where}: scratch["{name}"]', value, clients, device)
    for name, value in after.heard.items():
        if not isinstance(value, Tensor) or value.device != device:
            raise MethodError(
                f'{where}: heard["{name}"]: got {_described(value)}, expected a tensor on {device}; use '
                "cohort.with_heard, which puts it there"
            )


def check_kept(method: Method, before: Cohort, after: Cohort) -> Cohort:
    """What `client_rest` keeps: each entry as it was before, or dropped."""
    with named(method):
        kept = {name: value for name, value in before.state.items() if name in after.state}
        _expect_same("client_rest: state", kept, after.state, "client_start")
        if after.params.shape not in (before.params.shape, (len(before.ids), 0)):
            raise MethodError(
                f"client_rest: got params {_described(after.params)}, expected them unchanged or cohort.without_model()"
            )
    return after


def _without_kept(one: Cohort, kept: Cohort) -> Iterator[tuple[str, Cohort]]:
    """Each thing that is not kept, by name, and the client with values in its place that no computation survives."""

    def spoilt(value: Tensor) -> Tensor:
        return torch.full_like(value, torch.nan if value.is_floating_point() else 77)

    if one.params.shape[1] and not kept.params.shape[1]:
        yield "cohort.params", replace(one, params=spoilt(one.params))
    for name, value in one.state.items():
        if name not in kept.state:
            yield f'state["{name}"]', one.with_state(**{name: spoilt(value)})


def _results(cohort: Cohort) -> Tensors:
    return {"params": cohort.params, **cohort.state, **{f"heard.{name}": own for name, own in cohort.heard.items()}}


def _give_same(call: Callable[[Cohort], Tensors], cohort: Cohort, expected: Tensors) -> bool:
    try:
        found = call(cohort)
    except Exception:  # a method may refuse NaN in its own way
        return False
    return all(torch.equal(value, found[name]) for name, value in expected.items())


# --- objectives -------------------------------------------------------------------------------------------------------


def checked_objective(method: Method, cohort: Cohort, round: int) -> Objective:
    """The method's objective. Tensors with one row for each client must be marked. A tensor may have as many rows by
    accident (ten classes, ten clients); then it has the same shape in the objective of one client alone."""
    objective = method.objective(cohort, round)
    suspects = _unmarked(objective, cohort)
    if suspects:
        alone = dict(leaves(method.objective(cohort.rows(slice(0, 1)), round)))
        for path, value in suspects:
            if isinstance(own := alone.get(path), Tensor) and own.shape != value.shape:
                raise _not_marked(objective, path, value)
    return objective


def check_given_objective(objective: Objective, cohort: Cohort) -> None:
    """Of an objective given to `work.train`, which cannot be made again for other clients: every tensor with as many
    rows as there are clients must be marked, unless it is in `cohort.heard`."""
    for path, value in _unmarked(objective, cohort):
        raise _not_marked(objective, path, value)


def _unmarked(objective: Objective, cohort: Cohort) -> list[tuple[str, Tensor]]:
    """Tensors that have as many rows as there are clients, and are not marked; marked ones are checked. With a client
    alone there is nothing that a mark would change."""
    if not isinstance(objective, Objective):
        raise MethodError(f"objective: got {_described(objective)}, expected an Objective")
    clients, shared, found = len(cohort.ids), {id(value) for value in cohort.heard.values()}, []
    for path, leaf in leaves(objective):
        if isinstance(leaf, PerClient):
            _expect_rows(f"{type(objective).__name__}.{path}", leaf.value, clients, cohort.params.device)
        elif leaf.shape[:1] == (clients,) and clients > 1 and id(leaf) not in shared:
            found.append((path, leaf))
    return found


def _not_marked(objective: Objective, path: str, value: Tensor) -> MethodError:
    return MethodError(
        f"{type(objective).__name__}.{path}: got {_described(value)} with one row for each client, but not marked as "
        f"such; pass PerClient(tensor) and read self.{path}.value in the objective, so that it is split together with "
        "the clients (a tensor that all clients share belongs in cohort.with_heard)"
    )


def checked_gradient(objective: Objective, params: Tensor) -> Tensor | None:
    """`objective.gradient(params)`, contiguous, as kernels read it."""
    found = objective.gradient(params)
    if found is None:
        return None
    _expect_like(f"{type(objective).__name__}.gradient", found, params)
    return found.contiguous()


def checked_step(objective: Objective, params: Tensor, step: int) -> Tensor:
    """`objective.after_step(params, step)`: memory that the next step may write into."""
    found = objective.after_step(params, step)
    if found is params:
        return params
    _expect_like(f"{type(objective).__name__}.after_step", found, params)
    held = (leaf.value if isinstance(leaf, PerClient) else leaf for _, leaf in leaves(objective))
    place = found.untyped_storage().data_ptr()
    return found.clone() if any(own.untyped_storage().data_ptr() == place for own in held) else found.contiguous()


def checked_loss(objective: Objective, features: Tensor, labels: Tensor) -> Tensor:
    """`objective.loss(features, labels)`."""
    found = objective.loss(features, labels)
    if not _is_like(found, features.shape[:1], features.dtype, {features.device}):
        raise MethodError(
            f"{type(objective).__name__}.loss: got {_described(found)}, expected {features.dtype} of shape "
            f"{list(features.shape[:1])} on {features.device}, one number for each client; take the mean over all "
            "other axes"
        )
    return found


# --- tensors ----------------------------------------------------------------------------------------------------------


def _expect_like(where: str, value: Any, params: Tensor) -> None:
    if not _is_like(value, params.shape, params.dtype, {params.device}):
        raise MethodError(
            f"{where}: got {_described(value)}, expected {params.dtype} of shape {list(params.shape)} on "
            f"{params.device}, [clients, dim] like `params`; use expand_as(params), .to(params.dtype) or PerClient"
        )


def _expect_rows(where: str, value: Any, clients: int, device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.shape[:1] != (clients,) or value.device != device:
        raise MethodError(
            f"{where}: got {_described(value)}, expected a tensor of shape [{clients}, …] on {device}, one row for "
            "each client of the cohort; make it with torch.zeros_like(cohort.params) or value.expand(clients, …)"
        )


def _expect_tensors(where: str, values: Any) -> None:
    if not isinstance(values, dict):
        raise MethodError(f"{where}: got {_described(values)}, expected a dict of tensors")
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise MethodError(f"{where}: {name}: got {_described(value)}, expected a tensor")


def _expect_same(where: str, before: Mapping[str, Tensor], after: Any, declared: str) -> None:
    """The same names, shapes, dtypes and devices."""
    _expect_tensors(where, after)
    if after.keys() != before.keys():
        added, lost = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
        raise MethodError(
            f"{where}: got the entries {sorted(after)} ({added or 'none'} added, {lost or 'none'} missing), expected "
            f"{sorted(before)}, those that {declared} makes; make every entry there, with zeros for instance"
        )
    for name, value in after.items():
        old = before[name]
        if not _is_like(value, old.shape, old.dtype, {old.device}):
            raise MethodError(
                f"{where}: {name}: got {_described(value)}, expected {old.dtype} of shape {list(old.shape)} on "
                f"{old.device}, as before; keep shape, dtype and device from round to round"
            )


def _expect_message(
    where: str, message: Message, values: Any, rows: tuple[int, ...], devices: Collection[torch.device] | None
) -> None:
    """One tensor for each declared field."""
    _expect_tensors(where, values)
    names = [part.name for part in message.fields]
    if sorted(values) != sorted(names):
        raise MethodError(f"{where}: got values for {sorted(values)}, expected the message's fields {sorted(names)}")
    for part in message.fields:
        value, shape, kind = values[part.name], (*rows, *part.shape), _DTYPES[part.dtype]
        if not _is_like(value, shape, kind, devices or {value.device}):
            raise MethodError(
                f"{where}: field {part.name!r}: got {_described(value)}, expected {kind} of shape {list(shape)} as "
                f"{type(part).__name__} is declared"
            )


def _is_like(value: Any, shape: Collection[int], dtype: torch.dtype, devices: Collection[torch.device]) -> bool:
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == tuple(shape)
        and value.dtype == dtype
        and value.device in devices
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"


def _pair(where: str, found: Any, expected: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise MethodError(f"{where}: got {_described(found)}, expected the pair {expected}")
    return found
