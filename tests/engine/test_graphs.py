"""Recorded computations: tensors are copied into a recording, and everything else must be the same."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedlms
from factories import federation, played
from pfedlms.engine import client as engine_client
from pfedlms.engine.criterion import filled_up, splitter
from pfedlms.engine.graphs import Replayed, flat, rebuilt
from pfedlms.methods.contract import Objective, PerClient


class Place(NamedTuple):
    start: int
    offset: Tensor


@dataclass(frozen=True)
class Inner:
    scale: float
    rows: Tensor
    place: Place = field(default_factory=lambda: Place(3, torch.tensor([1, 2])))

    @cached_property
    def doubled(self) -> Tensor:
        return 2 * self.rows


@dataclass(frozen=True)
class Nested(Objective):
    inner: Inner
    many: tuple[Tensor, ...]
    named: dict[str, Any] = field(default_factory=dict)


class Plain(Objective):
    """Not a dataclass: all attributes count."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def nested(start: float = 0.0, scale: float = 2.0, **named: Any) -> Nested:
    return Nested(Inner(scale, torch.full((3,), start)), (torch.tensor([start]), torch.tensor(7)), named)


def kind(value: Any) -> object:
    return flat(value, [])


FUNCTION = lambda: None  # noqa: E731 - an attribute
ALIKE = {
    "other tensors": (nested(0.0), nested(5.0)),
    "equal arrays": (nested(a=np.arange(3)), nested(a=np.arange(3))),
    "one function": (nested(a=FUNCTION), nested(a=FUNCTION)),
    "no dataclass": (Plain(a=1, b=torch.ones(2)), Plain(a=1, b=torch.zeros(2))),
}
DIFFERENT = {
    "a number": (nested(), nested(scale=3.0)),
    "a shape": (nested(a=torch.zeros(3)), nested(a=torch.zeros(4))),
    "a dtype": (nested(a=torch.zeros(3)), nested(a=torch.zeros(3).double())),
    "one more": (nested(a=[None]), nested(a=[None, None])),
    "a name": (nested(), nested(extra=None)),
    "another class": (nested(), Objective()),
    "an array": (nested(a=np.arange(3)), nested(a=np.array([0, 1, 3]))),
    "a function": (nested(a=FUNCTION), nested(a=lambda: None)),
    "no dataclass": (Plain(a=1, b=torch.ones(2)), Plain(a=2, b=torch.ones(2))),
}


@pytest.mark.parametrize(("pairs", "alike"), [(ALIKE, True), (DIFFERENT, False)], ids=["alike", "different"])
def test_only_other_tensors_are_the_same_computation(pairs: dict[str, tuple[Any, Any]], alike: bool) -> None:
    assert {name: kind(one) == kind(other) for name, (one, other) in pairs.items()} == dict.fromkeys(pairs, alike)


@pytest.mark.parametrize("make", [lambda x: nested(x, t=torch.tensor(x)), lambda x: Plain(a=1, b=torch.tensor(x))])
def test_a_rebuilt_value_has_the_new_tensors_and_no_cached_values(make: Any) -> None:
    first, second = make(1.0), make(2.0)
    if isinstance(first, Nested):
        assert first.inner.doubled.tolist() == [2.0] * 3  # cached
    tensors: list[Tensor] = []
    flat(second, tensors)
    copy = rebuilt(first, iter(tensors))
    again: list[Tensor] = []
    assert flat(copy, again) == kind(second)
    assert all(one is other for one, other in zip(again, tensors, strict=True))
    if isinstance(copy, Nested):
        assert copy.inner.doubled.tolist() == [4.0] * 3
        assert copy.inner.place.start == 3


def test_only_tensors_of_each_client_are_split_and_padded() -> None:
    shared, own = Inner(2.0, torch.ones(3)), torch.arange(6.0).view(3, 2)
    objective = Nested(shared, (torch.zeros(3),), {"own": [PerClient(own)]})
    assert shared.doubled.tolist() == [2.0] * 3  # cached, and kept in parts that do not change
    for made, rows in ((splitter(objective)(slice(1, 3)), own[1:]), (filled_up(objective, 5), own[[0, 1, 2, 2, 2]])):
        assert torch.equal(made.named["own"][0].value, rows)
        assert made.inner is shared
        assert made.many[0] is objective.many[0]
    assert kind(splitter(objective)(slice(0, 1))) != kind(objective)  # another number of clients is another computation
    copy = rebuilt(objective, iter([own, *[torch.zeros(3)] * 3]))
    assert isinstance(copy.named["own"][0], PerClient)
    unmarked = Nested(shared, (own,))
    assert splitter(unmarked)(slice(1, 3)) is unmarked


@pytest.mark.parametrize(
    ("largest", "clients", "size"), [(100, 51, 100), (100, 50, 50), (100, 26, 50), (100, 1, 1), (100, 7, 12), (4, 9, 9)]
)
def test_recordings_are_made_for_few_cohort_sizes(largest: int, clients: int, size: int) -> None:
    assert Replayed(largest)._size(clients) == size


@pytest.mark.parametrize(("method", "gradients"), [("obda", 3 + 2), ("fedavg", 0)])
def test_steps_and_gradients_are_replayed_on_a_gpu(
    method: str, gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One computation of gradients in each round; and two more in the first, which check that clients need no value
    that is not stored while they are absent."""
    replayed: list[str] = []

    def recording(largest: int) -> Any:
        return lambda steps, *given: (replayed.append(steps.__name__), steps(*given))[1]

    monkeypatch.setattr(engine_client, "backend_of", lambda tensor: "gpu")
    monkeypatch.setattr(engine_client, "Replayed", recording)
    pfedlms.run("digits", method=method, clients=4, rounds=3, local_steps=2, device="cpu")
    assert replayed.count("_gradients") == gradients
    assert replayed.count("_steps") == 1 + 3  # before the first round, and in each


class Counted(nn.Linear):
    """Its outputs depend on how often it was called, in evaluations, too."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.flatten(1)) / self.calls


def test_what_is_recorded_leaves_its_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used once to warm up and once more for the recording."""

    def warmed_up(largest: int) -> Any:
        return lambda steps, *given: (steps(*given), steps(*given))[1]

    settings = {"method": "fedavg", "clients": 3, "rounds": 2, "local_steps": 2, "device": "cpu"}
    plain = pfedlms.run("digits", Counted, **settings)
    monkeypatch.setattr(engine_client, "backend_of", lambda tensor: "gpu")
    monkeypatch.setattr(engine_client, "Replayed", warmed_up)
    recorded = pfedlms.run("digits", Counted, **settings)
    assert [record["test_loss"] for record in recorded.metrics] == [record["test_loss"] for record in plain.metrics]


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "sketchmean"])
def test_a_federation_is_freed_without_the_garbage_collector(method: str) -> None:
    """Recordings and clients take most of a GPU, so the next run must not wait for a collection of cycles."""
    gc.disable()
    try:
        made = played(federation(method), 1)
        held = [weakref.ref(each) for each in (made, made._worker, made._clients)]
        del made
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()
