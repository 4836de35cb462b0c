"""Shared by all tests: small tasks, cohorts, data and models, federations, and records of their messages."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedlms.engine.simulate as engine_simulate
import pfedlms.engine.transport as engine_transport
from pfedlms.data import FederatedData, Partitioning, from_pairs, from_pool, load_dataset
from pfedlms.engine import Federation
from pfedlms.engine.client import Client, LocalWorker
from pfedlms.engine.simulate import InProcess, Link, Links, perfect_link, run_exchange
from pfedlms.engine.transport import Code, Record
from pfedlms.methods import METHODS, Exchange, Task
from pfedlms.models import Cohort, CohortModel, Layer, Layout, build
from pfedlms.pull import Pull
from pfedlms.sketch import Sketch
from pfedlms.train_settings import TrainSettings
from pfedlms.wire import Bits, Floats, Mask, MaskedBytes, Message, Positions, Signs, Symbols
from pfedlms.wire.frames import HEADER_BYTES

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- tiny tasks and cohorts -------------------------------------------------------------------------------------------


def layout_of(*sizes: int) -> Layout:
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return Layout((), tuple(Layer(f"layer{i}", at, n) for i, (at, n) in enumerate(zip(offsets, sizes, strict=True))))


def task_of(
    *sizes: int,
    clients: int = 3,
    seed: int = 5,
    initial: Tensor | None = None,
    learning_rate: float = 0.1,
    weight_decay: float = 0.0,
) -> Task:
    layout = layout_of(*sizes)
    start = torch.zeros(layout.dim) if initial is None else initial
    return Task(layout, 10, 4, seed, start, clients, clients, learning_rate, weight_decay)


def method_of(name: str, task: Task, **settings: Any) -> Any:
    return METHODS[name](task, METHODS[name].Settings(**settings))


def exchange_of(name: str, task: Task, **settings: Any) -> Any:
    """The only exchange of a method."""
    (exchange,) = method_of(name, task, **settings).exchanges
    return exchange


def cohort_of(
    params: Tensor, ids: Sequence[int] | None = None, samples: Sequence[int] | None = None, **state: Tensor
) -> Cohort:
    """Clients with `params: [clients, dim]`; every tensor of `state` is given without a clients axis."""
    clients = len(params)
    return Cohort(
        tuple(ids or range(clients)),
        tuple(samples or [1] * clients),
        params,
        params.new_zeros(clients, 0),
        {},
        {name: value.expand(clients, *value.shape).clone() for name, value in state.items()},
    )


@dataclass(frozen=True)
class Work:
    """A `ClientWork` with fixed results; a result that was not given is an error."""

    gradient: Tensor | None = None
    features: tuple[Tensor, Tensor] | None = None

    def mean_gradient(self, cohort: Cohort, params: Tensor, phase: int) -> Tensor:
        assert self.gradient is not None
        return self.gradient[list(cohort.ids)]

    def class_features(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        assert self.features is not None
        means, counts = self.features
        return means[list(cohort.ids)], counts[list(cohort.ids)]


def hold(
    exchange: Exchange[Any],
    cohorts: Cohort | Sequence[Cohort],
    server: dict[str, Tensor] | None = None,
    *,
    round: int = 0,
    work: Work | None = None,
    link: Link = perfect_link,
) -> tuple[list[Cohort], dict[str, Tensor]]:
    """Run one exchange with encoded messages."""
    groups = [cohorts] if isinstance(cohorts, Cohort) else list(cohorts)
    terms = SimpleNamespace(method=SimpleNamespace(exchanges=(exchange,)), digest=bytes(8), catch_up=None)
    client = Client(terms, work or Work(), None)  # type: ignore[arg-type]
    transport = InProcess(client, None, Links(link))  # type: ignore[arg-type]
    asked, server, answer, inbox = run_exchange(transport, Record(Code.SEND, round), groups, server or {})
    for event in inbox.events:
        warnings.warn(str(event), stacklevel=2)
    return transport.answer(inbox.requests[0], answer, asked, inbox), server


# --- data and models --------------------------------------------------------------------------------------------------


def small_data(*counts: int) -> FederatedData:
    """Clients with these numbers of training samples of 4 numbers; client k has no sample of class k, and no client has
    one of class 3."""
    random = np.random.default_rng(4)

    def drawn(client: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        held = [label for label in range(3) if label != client]
        labels = np.array([held[i % len(held)] for i in range(count)])
        return random.normal(size=(count, 4)) + labels[:, None], labels

    data = from_pairs([(drawn(client, count), drawn(client, 3)) for client, count in enumerate(counts)])
    return FederatedData(data.x, data.y, data.train, data.test, classes=4)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A module with weights that PyTorch draws from this seed; the global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


LABELS = torch.zeros(64, 0)  # of as many clients as there may be; `squares` looks at none


def squares(
    outputs: Tensor, features: Tensor | None, labels: Tensor, rows: slice
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Half the squared length of outputs and of features, whose gradients are themselves; those of a first layer are
    the samples."""
    ends = [end for end in (outputs, features) if end is not None and end.requires_grad]
    losses = sum(end.detach().flatten(1).square().sum(dim=1) / 2 for end in ends)
    return losses, ends, [end.detach().clone() for end in ends]


SMALL_LAYERS = (4 * 6 + 6, 6 * 4 + 4)
SMALL_DIM = sum(SMALL_LAYERS)


def small_module() -> nn.Sequential:
    """A model for `small_data` with SMALL_LAYERS."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), 2)


CLIENTS = 5
HIDDEN = 20
LAYERS = (64 * HIDDEN + HIDDEN, HIDDEN * 10 + 10)  # 1,300 and 210 parameters
DIM = sum(LAYERS)
SEED = 3


@cache
def digits(clients: int = CLIENTS, seed: int = 0) -> FederatedData:
    return from_pool(*load_dataset("digits"), Partitioning(clients, 0.5, seed))


def digits_module() -> nn.Module:
    """A model for `digits` with LAYERS."""
    return build("dnn", digits().shape, digits().classes, HIDDEN, key=1)


# --- federations ------------------------------------------------------------------------------------------------------

TRAIN = {"local_steps": 3, "batch_size": 16, "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 1e-4}


def federation(
    method: str, data: FederatedData | None = None, module: nn.Module | None = None, *, seed: int = SEED, **chosen: Any
) -> Federation:
    """A federation on the CPU, of digits unless data and a module for it are given.

    Keywords are those of `TrainSettings`, of `Federation` and of the method's settings, distinguished by name; the
    module is copied.
    """

    def taken(names: Any) -> dict[str, Any]:
        return {name: chosen.pop(name) for name in list(chosen) if name in names}

    train = TrainSettings(**{**TRAIN, **taken({each.name for each in fields(TrainSettings)})})
    engine = taken(signature(Federation).parameters)
    model = CohortModel(deepcopy(module or digits_module()), CPU)
    return Federation(
        METHODS[method], METHODS[method].Settings(**chosen), model, data or digits(), train, seed, **engine
    )


def played(made: Federation, rounds: int) -> Federation:
    """The federation after its start and `rounds` rounds."""
    made.start()
    for _ in range(rounds):
        made.play_round()
    return made


def worker_of(module: nn.Module, data: FederatedData, train: TrainSettings, seed: int) -> LocalWorker:
    """The worker that trains the clients of a federation."""
    return federation("local", data, module, seed=seed, **vars(train))._worker


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """All tensors of a nested state, by their path."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        return {name: found for key, part in value.items() for name, found in tensors(part, f"{path}/{key}").items()}
    return {}


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, tensors bit by bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


# --- sketches and pulls -----------------------------------------------------------------------------------------------

# No padding (16, 64, 1), a little (5 → 8, 11 → 16) and as much as there can be (33 → 64).
SIZES = (16, 11, 1, 5, 64, 33)
RATIO = 0.5


def sketch_of(*sizes: int, ratio: float = RATIO, seed: int = SEED, epoch: int = 0) -> Sketch:
    return Sketch(layout_of(*sizes), ratio, seed, epoch)


def some_thresholds(layers: int, levels: int, seed: int = 0) -> Tensor:
    return normal(layers, levels, seed=seed, dtype=torch.float64).sort(dim=1).values


def some_consensus(size: int, levels: int, seed: int = 0) -> Tensor:
    chosen = torch.randint(0, levels + 1, (size,), generator=torch.Generator().manual_seed(seed))
    return chosen.to(torch.uint8)


@dataclass(frozen=True)
class SomePull:
    """A pull through Φ of SIZES towards some consensus, and its parts."""

    pull: Pull
    tau: Tensor
    rho: Tensor
    consensus: Tensor


def some_pull(levels: int, strength: float, smoothing: float) -> SomePull:
    sketch = sketch_of(*SIZES)
    tau, consensus = some_thresholds(len(SIZES), levels, seed=1), some_consensus(sketch.size, levels, seed=2)
    deviations = torch.tensor([1.0, 0.5, 2.0, 1.5, 0.8, 1.2], dtype=torch.float64)
    pull = Pull(sketch, tau, deviations, consensus, strength, smoothing)
    return SomePull(pull, tau, smoothing * deviations, consensus)


def one_layer_pull(tau: float, strength: float, rho: float) -> Pull:
    """T = 1, one layer of 16 parameters without padding (N/m = 2), every vote +1."""
    thresholds, deviation = torch.full((1, 1), tau, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    return Pull(sketch_of(16), thresholds, deviation, torch.ones(8, dtype=torch.uint8), strength, rho)


# --- frames -----------------------------------------------------------------------------------------------------------

LARGEST = float(np.finfo(np.float32).max)


def sealed(data: bytes) -> bytes:
    """The frame with a correct checksum."""
    return data[:36] + struct.pack("<I", zlib.crc32(data[40:], zlib.crc32(data[:36]))) + data[40:]


def random_floats(draw: np.random.Generator, shape: tuple[int, ...], minimum: float) -> np.ndarray:
    """Any finite bits, and often the largest and smallest there are."""
    bits = draw.integers(0, 1 << 32, shape, dtype=np.uint32)
    extremes = np.float32([LARGEST, -LARGEST, 2.0**-149, -(2.0**-149), 0.0, -0.0, 1.0]).view(np.uint32)
    values = np.where(draw.random(shape) < 0.5, draw.choice(extremes, shape), bits).astype(np.uint32).view(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(1))
    return np.maximum(np.abs(values), np.float32(minimum)) if minimum > -np.inf else values


def random_values(message: Message, draw: np.random.Generator) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    for part in message.fields:
        match part:
            case Signs():
                value = draw.choice(np.float32([-1, 1]), part.shape)
            case Mask():
                value = draw.random(part.shape) < 0.5
            case Symbols():
                value = draw.integers(0, part.levels, part.shape).astype(np.uint8)
            case Bits():
                value = np.packbits(draw.random(part.count) < 0.5, bitorder="little")
            case MaskedBytes():
                value = draw.integers(0, 256, part.shape).astype(np.uint8)
            case Positions():
                value = np.sort(draw.choice(part.places, part.count, replace=False))
            case Floats():
                value = random_floats(draw, part.shape, part.minimum)
            case _:  # masked rows
                value = random_floats(draw, part.shape, -np.inf)
        values[part.name] = value
    return values


# --- records of messages ----------------------------------------------------------------------------------------------


@dataclass
class RecordingLink:
    """A link that records the frames of clients."""

    frames: list[bytes] = field(default_factory=list)

    def __call__(self, data: bytes, sender: int) -> bytes:
        self.frames.append(data)
        return data

    @property
    def payloads(self) -> list[bytes]:
        return [data[HEADER_BYTES:] for data in self.frames]


@dataclass(frozen=True)
class Sent:
    """One message before it was encoded, and its frame."""

    message: Message
    values: dict[str, np.ndarray]
    round: int
    sender: int
    digest: bytes
    data: bytes

    @property
    def payload(self) -> bytes:
        return self.data[HEADER_BYTES:]


@contextmanager
def recorded_messages() -> Iterator[list[Sent]]:
    """Records every message of both directions that the engine encodes in this context."""
    messages: list[Sent] = []
    encode, encode_rows = engine_simulate.frame, engine_simulate.frame_rows

    def frame(message: Message, values: Any, *, round: int, sender: int, digest: bytes, **more: Any) -> bytes:
        data = bytes(encode(message, values, round=round, sender=sender, digest=digest, **more))
        messages.append(Sent(message, {name: np.array(v) for name, v in values.items()}, round, sender, digest, data))
        return data

    def frame_rows(
        message: Message, values: Any, *, round: int, senders: Any, digest: bytes, out: Any, **more: Any
    ) -> None:
        encode_rows(message, values, round=round, senders=senders, digest=digest, out=out, **more)
        for row, sender in enumerate(senders):
            own = {name: np.array(each[row]) for name, each in values.items()}
            messages.append(Sent(message, own, round, sender, digest, out[row].tobytes()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_simulate, "frame", frame)
        patch.setattr(engine_transport, "frame", frame)
        patch.setattr(engine_simulate, "frame_rows", frame_rows)
        yield messages


class Frames:
    """Every frame that the engine makes, by kind, round and sender."""

    def __init__(self, sent: list[Sent]) -> None:
        self._sent = sent

    def __getitem__(self, key: tuple[int, int, int]) -> bytes:
        return next(each.data for each in reversed(self._sent) if self._key(each) == key)

    def __len__(self) -> int:
        return len({self._key(each) for each in self._sent})

    def _key(self, sent: Sent) -> tuple[int, int, int]:
        return sent.message.kind, sent.round, sent.sender
