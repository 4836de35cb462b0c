"""What `method_check` sees of a federation while it plays, and how it compares two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pfedlms.backend import to_host
from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.federation import Federation
from pfedlms.methods.contract import ClientWork, Exchange, Method
from pfedlms.wire import MaskedBytes, MaskedRows, Message, Signs


class Failed(Exception):
    """What a check found wrong."""


@dataclass
class Notes:
    """What was seen of a federation while it played."""

    states: dict[int, dict[int, Tensors]] = field(default_factory=dict)
    """By round and client: `state` after its last answer."""
    wrong: list[str] = field(default_factory=list)
    """Messages that arrived with other values than were sent."""
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    """Clients' messages, with the sender."""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    models: list[Tensor | None] = field(default_factory=list)
    """The server's tracked model after every round."""
    replies: dict[int, Tensors] = field(default_factory=dict)
    """By round: the values of the server's last answer."""

    def link(self, data: bytes, client: int) -> bytes:
        self.frames.append((client, data))
        return data

    def answer_link(self, data: bytes, client: int) -> bytes:
        self.answers.append((client, data))
        return data


def watched(method: type[Method], notes: Notes) -> type[Method]:
    """The method, with exchanges that note what they see."""

    def __init__(self: Method, task: Any, settings: Any) -> None:
        method.__init__(self, task, settings)
        self.exchanges = tuple(_Watched(each, notes) for each in self.exchanges)  # type: ignore[misc]

    return type(method.__name__, (method,), {"__init__": __init__, "__module__": method.__module__})


class _Watched:
    """An exchange that notes what it sees; messages name the method's own class."""

    __class__ = property(lambda self: type(self._exchange))

    def __init__(self, exchange: Exchange[Any], notes: Notes) -> None:
        self._exchange, self._notes = exchange, notes
        self._sent: dict[int, Tensors] = {}
        self._reply: dict[int, Tensors] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_exchange"], name)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        result = self._exchange.client_send(cohort, round, work)
        for row, client in enumerate(cohort.ids):
            self._sent[client] = {name: value[row] for name, value in _tensors_in(result).items()}
        return result

    def server_add(self, total: Any, ids: list[int], samples: list[int], values: Tensors) -> Any:
        for row, client in enumerate(ids):
            got = {name: value[row] for name, value in values.items()}
            self._compare(f"a message of client {client}", self.up, self._sent[client], got)
        return self._exchange.server_add(total, ids, samples, values)

    def server_reply(self, server: Tensors, total: Any, round: int) -> tuple[Tensors, Tensors]:
        result = self._exchange.server_reply(server, total, round)
        self._reply[round] = self._notes.replies[round] = _tensors_in(result)
        return result

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        self._compare("an answer of the server", self.down, self._reply.get(round, {}), values)
        after = self._exchange.client_receive(cohort, values, round)
        if isinstance(after, Cohort):
            for row, client in enumerate(after.ids):
                state = {name: value[row].clone() for name, value in after.state.items() if value.ndim}
                self._notes.states.setdefault(round, {})[client] = state
        return after

    def _compare(self, what: str, message: Message, sent: Tensors, got: Tensors) -> None:
        for part in message.fields:
            if part.name not in sent:
                continue
            (expected,) = to_host(sent[part.name])
            if isinstance(part, Signs):
                expected = torch.where(expected >= 0, 1.0, -1.0)
            elif isinstance(part, MaskedRows | MaskedBytes):
                rows = to_host(sent[part.mask])[0].to(expected.dtype)
                expected = expected * (rows.unsqueeze(1) if expected.ndim == 2 else rows)
            if expected.shape == got[part.name].shape and not torch.equal(
                expected.to(got[part.name].dtype), got[part.name]
            ):
                self._notes.wrong.append(f"field {part.name!r} of {what} was read with other values than were sent")


def _tensors_in(result: Any) -> Tensors:
    """The values of a message that an exchange returned; nothing where they are not what they should be."""
    values = result[1] if isinstance(result, tuple) and len(result) == 2 else None
    if not isinstance(values, dict) or not all(isinstance(each, Tensor) and each.ndim for each in values.values()):
        return {}
    return dict(values)


def play_on(federation: Federation, notes: Notes, rounds: int) -> dict[str, Any]:
    for _ in range(rounds):
        federation.play_round()
        notes.models.append(federation.state()["server"].get("model"))
    return federation.state()


def answers_are_the_model(notes: Notes) -> bool:
    """Whether the answer of every round contains the server's tracked model after it."""
    return bool(notes.replies) and all(
        model is not None and any(torch.equal(value, model) for value in notes.replies.get(round, {}).values())
        for round, model in enumerate(notes.models)
    )


def shared(notes: Notes) -> list[str]:
    """Entries of `state` that all clients have in common after every answer, and that change from round to round."""
    rounds = list(notes.states.values())
    if not rounds:
        return []
    first, last = rounds[0][0], rounds[-1][0]
    changed = [n for n, own in first.items() if own.is_floating_point() and own.ndim and not torch.equal(own, last[n])]
    return [n for n in changed if all(odd_one_out({k: own[n] for k, own in each.items()}) is None for each in rounds)]


def odd_one_out(rows: dict[int, Tensor]) -> int | None:
    """A client whose tensor is not that of the first."""
    first = next(iter(rows.values()))
    return next((client for client, value in rows.items() if not torch.equal(value, first)), None)


# --- comparing --------------------------------------------------------------------------------------------------------

_WHY = (
    "Each client's results must follow from that client's own rows, its messages, the seed and the round alone: mark "
    "per-client tensors of an objective with PerClient, take no sum or mean over the clients axis, name random streams "
    "by seed, round and client (pfedlms.rng), and keep nothing on `self` or in global variables"
)


def expect_same(one: tuple[dict[str, Any], Notes], other: tuple[dict[str, Any], Notes], what: str) -> None:
    path = _difference(one[0], other[0])
    if path is not None:
        raise Failed(f"{what} differ in {path}. {_WHY}")
    for (client, data), (_, again) in zip(one[1].frames, other[1].frames, strict=False):
        if data != again:
            raise Failed(f"{what} differ in a message of client {client}. {_WHY}")
    if len(one[1].frames) != len(other[1].frames):
        raise Failed(f"{what} differ in the number of messages. {_WHY}")


def _difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two nested values differ first, by name; None if nowhere."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return None if same else path
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{path} (its keys)"
        parts = ((f"{path}.{key}" if path else str(key), one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{path} (its length)"
        parts = ((f"{path}[{place}]", mine, other[place]) for place, mine in enumerate(one))
    else:
        return None if one == other else path
    return next((found for name, mine, yours in parts if (found := _difference(mine, yours, name)) is not None), None)
