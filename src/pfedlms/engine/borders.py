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
from pfedlms.engine.criterion import check_objective, described, expect_rows, is_like
from pfedlms.errors import MethodError, PfedlmsError
from pfedlms.methods.contract import ClientWork, Exchange, Method, Tracked
from pfedlms.wire.fields import Message

_COMPARED_ROUNDS = 3  # in which every client's tracked model is compared with the server's

_HOST = torch.device("cpu")
_DTYPES = {np.float32: torch.float32, np.uint8: torch.uint8, np.bool_: torch.bool, np.int64: torch.int64}


def guarded(method: Method, weights: str = "samples") -> Method:
    """The method, with functions and exchanges that check what they return; `weights` is `train.weights`."""
    with named(method, "server_start"):
        server = method.server_start()
        _expect_tensors("", server)
        if method.tracks and "model" not in server:
            raise MethodError('got no "model", expected w, because `tracks` is true; derive the method from Tracked')
    for name, check in _CHECKS.items():
        setattr(method, name, _checked(method, name, check))
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
        raise error.of(method.name, function) from error.__cause__
    except PfedlmsError:
        raise
    except Exception as error:  # a method of the user's own may raise anything
        if not function:
            raise
        raise MethodError(f"raised {type(error).__name__}: {error}").of(method.name, function) from error


Check = Callable[[Callable[..., Any], Any, Any], None]
"""Of a function of a method: the function, the first of its arguments, and what it returned."""


def _checked(method: Method, name: str, check: Check) -> Callable[..., Any]:
    call = getattr(method, name)

    def checked_call(first: Any, *others: Any) -> Any:
        with named(method, name):
            found = call(first, *others)
            check(lambda one: call(one, *others), first, found)
            return found

    return checked_call


class GuardedExchange(Exchange[Any]):
    """An exchange of a method; all that its functions return is checked."""

    def __init__(self, method: Method, exchange: Exchange[Any], is_last: bool, weights: str) -> None:
        self._method, self._exchange, self._is_last, self._weights = method, exchange, is_last, weights
        self.up, self.down = exchange.up, exchange.down
        self._replied: tuple[int, Tensor, Tensor] | None = None
        self._tried: set[str] = set()

    # Code that knows a method's own exchange finds it here, by its class and its attributes.
    __class__ = property(lambda self: type(self._exchange))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_exchange"], name)

    def _named(self, function: str) -> Any:
        return named(self._method, f"{self._exchange.__class__.__name__}.{function}")

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        with self._named("client_send"):
            after, values = _pair(self._exchange.client_send(cohort, round, work), "(cohort, values)")
            check_same_clients(cohort, after)
            _expect_message(self.up, values, (len(cohort.ids),), {cohort.params.device, _HOST})
            if not self._method.about_last_steps:
                self._check_absence("send", cohort, lambda one: self._exchange.client_send(one, round, work)[1])
            return after, values

    def in_step(self, server: Tensors, values: Tensors) -> list[bool]:
        with self._named("in_step"):
            alike, senders = self._exchange.in_step(server, values), len(next(iter(values.values())))
            if len(alike) != senders:
                raise MethodError(f"got {len(alike)} answers, expected one for each of {senders}")
            return alike

    def server_open(self, server: Tensors, round: int) -> Any:
        with self._named("server_open"):
            return self._exchange.server_open(server, round)

    def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
        own = [1] * len(ids) if self._weights == "uniform" else samples
        with self._named("server_add"):
            return self._exchange.server_add(total, ids, own, values)

    def server_reply(self, server: Tensors, total: Any, round: int) -> tuple[Tensors, Tensors]:
        with self._named("server_reply"):
            after, values = _pair(self._exchange.server_reply(server, total, round), "(the server's state, values)")
            _expect_same("state: ", server, after, "server_start")
            _expect_message(self.down, values, (), None)
        if isinstance(self._method, Tracked) or self._method.tracks:
            self._replied = round, server["model"], after["model"]
        return after, values

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        with self._named("client_receive"):
            after = self._exchange.client_receive(cohort, values, round)
            check_same_clients(cohort, after)
            if self._replied is not None and self._replied[0] == round < _COMPARED_ROUNDS:
                _check_tracked(cohort, after, *self._replied[1:])
            if self._is_last:
                self._check_absence(
                    "receive", cohort, lambda one: _results(self._exchange.client_receive(one, values, round))
                )
        return after

    def _check_absence(self, what: str, cohort: Cohort, call: Callable[[Cohort], Tensors]) -> None:
        """Refuse a function whose results depend on what a client does not keep while it is absent; tried once."""
        if what in self._tried:
            return
        self._tried.add(what)
        one = cohort.rows(slice(0, 1))
        lost = dict(_without_kept(one, self._method.client_rest(one)))
        expected = call(one) if lost else {}
        for name, without in lost.items():
            if not _give_same(call, without, expected):
                raise MethodError(
                    f"uses {name}, which clients do not keep while they are absent (see client_rest), so a "
                    "client that comes back would compute with w⁰ in its place. If answers are changes of a model that "
                    "all clients hold, derive the method from Tracked and leave `tracks` true: absent clients are then "
                    'sent what they missed, and state["model"] is w; else use the answer and what client_rest keeps'
                )


def _check_tracked(before: Cohort, cohort: Cohort, old: Tensor, model: Tensor) -> None:
    """Clients that had the server's model before an answer must have it after. Others were out of sync already."""
    if "model" not in cohort.state:
        raise MethodError('got no state["model"], expected w there, because the method is Tracked')
    device = cohort.params.device
    was = (before.state["model"] == old.to(device)).all(dim=1)
    alike = (~was | (cohort.state["model"] == model.to(device)).all(dim=1)).tolist()
    if not all(alike):
        raise MethodError(
            f'got a state["model"] of client {cohort.ids[alike.index(False)]} that is not the server\'s model, '
            "expected the same bits; both ends must compute it by the same operations on the same float32 values: "
            "those that the answer carries, and the model before it"
        )


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


# --- clients ----------------------------------------------------------------------------------------------------------


def check_same_clients(before: Cohort, after: Cohort) -> None:
    """Refuse a cohort that is not of the same clients with the same tensors, entries aside."""
    if not isinstance(after, Cohort):
        raise MethodError(f"got {described(after)}, expected a Cohort")
    if after is before:
        return
    if (after.ids, after.samples) != (before.ids, before.samples):
        raise MethodError(f"got clients {after.ids}, expected {before.ids}; keep `ids` and `samples`")
    for name in ("params", "momentum"):
        _expect_same("", {name: getattr(before, name)}, {name: getattr(after, name)}, "")
    _expect_same("buffers: ", before.buffers, after.buffers, "the model")
    _expect_same("state: ", before.state, after.state, "client_start")
    _check_rows("scratch", after.scratch, after)
    device = after.params.device
    for name, value in after.heard.items():
        if not isinstance(value, Tensor) or value.device != device:
            raise MethodError(
                f'heard["{name}"]: got {described(value)}, expected a tensor on {device}; use cohort.with_heard, which '
                "puts it there"
            )


def _check_rows(what: str, values: Tensors, cohort: Cohort) -> None:
    for name, value in values.items():
        expect_rows(f'{what}["{name}"]', value, len(cohort.ids), cohort.params.device)


def _check_kept(before: Cohort, after: Cohort) -> None:
    """What `client_rest` keeps: each entry as it was before, or dropped."""
    kept = {name: value for name, value in before.state.items() if name in after.state}
    _expect_same("state: ", kept, after.state, "client_start")
    if after.params.shape not in (before.params.shape, (len(before.ids), 0)):
        raise MethodError(
            f"got params {described(after.params)}, expected them unchanged or cohort.without_model()"
        )  # fmt: skip


_CHECKS: dict[str, Check] = {
    "client_start": lambda call, before, after: _check_rows("state", after.state, after),
    "client_rest": lambda call, before, after: _check_kept(before, after),
    "objective": lambda call, cohort, found: check_objective(found, cohort, call),
    "after_training": lambda call, before, after: check_same_clients(before, after),
    "global_model": lambda call, cohort, found: None,
}


# --- tensors by name --------------------------------------------------------------------------------------------------


def _expect_tensors(what: str, values: Any) -> None:
    if not isinstance(values, dict):
        raise MethodError(f"{what}got {described(values)}, expected a dict of tensors")
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise MethodError(f"{what}{name}: got {described(value)}, expected a tensor")


def _expect_same(what: str, before: Mapping[str, Tensor], after: Any, declared: str) -> None:
    """The same names, shapes, dtypes and devices."""
    _expect_tensors(what, after)
    if after.keys() != before.keys():
        added, lost = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
        raise MethodError(
            f"{what}got the entries {sorted(after)} ({added or 'none'} added, {lost or 'none'} missing), expected "
            f"{sorted(before)}, those that {declared} makes; make every entry there, with zeros for instance"
        )
    for name, value in after.items():
        old = before[name]
        if not is_like(value, old.shape, old.dtype, {old.device}):
            raise MethodError(
                f"{what}{name}: got {described(value)}, expected {old.dtype} of shape {list(old.shape)} on "
                f"{old.device}, as before; keep shape, dtype and device from round to round"
            )


def _expect_message(
    message: Message, values: Any, rows: tuple[int, ...], devices: Collection[torch.device] | None
) -> None:
    """One tensor for each declared field."""
    _expect_tensors("", values)
    names = [part.name for part in message.fields]
    if sorted(values) != sorted(names):
        raise MethodError(f"got values for {sorted(values)}, expected the message's fields {sorted(names)}")
    for part in message.fields:
        value, shape, kind = values[part.name], (*rows, *part.shape), _DTYPES[part.dtype]
        if not is_like(value, shape, kind, devices or {value.device}):
            raise MethodError(
                f"field {part.name!r}: got {described(value)}, expected {kind} of shape {list(shape)} as "
                f"{type(part).__name__} is declared"
            )


def _pair(found: Any, expected: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise MethodError(f"got {described(found)}, expected the pair {expected}")
    return found
