"""What the tests of the methods share: tiny tasks and cohorts, a small federation on digits, and transcriptions in
plain Python and dense NumPy of what the methods get from the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pfedlms.engine.exchange as engine_exchange
from pfedlms import rng
from pfedlms.data import FederatedData, batch_positions, from_pairs, from_pool, load
from pfedlms.engine import Federation
from pfedlms.engine.exchange import Channel, Link, Ways, perfect_link
from pfedlms.engine.training import LocalWorker, TrainSettings
from pfedlms.methods import METHODS, Exchange, Task
from pfedlms.models import Cohort, CohortModel, Layer, Layout, build
from pfedlms.wire import Message
from pfedlms.wire.frames import HEADER_BYTES

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
    """A `ClientWork` that answers with what it was given; asking for anything else is an error."""

    gradient: Tensor | None = None
    features: tuple[Tensor, Tensor] | None = None

    def mean_gradient(self, cohort: Cohort, params: Tensor, round: int) -> Tensor:
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
    """One exchange through real bytes."""
    groups = [cohorts] if isinstance(cohorts, Cohort) else list(cohorts)
    channel = Channel(bytes(8), round, Ways(link, quorum=0.0))
    after, server, _ = channel.hold(exchange, groups, server or {}, work or Work())
    return after, server


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- second implementations -------------------------------------------------------------------------------------------

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def plain_stream(seed: int, purpose: str, *counters: int) -> int:
    """The key of a stream, from the page of `rng`."""
    name = 0xCBF29CE484222325
    for byte in purpose.encode():
        name = (name ^ byte) * 0x100000001B3 & _WORD
    key = _mix(seed + _GAMMA & _WORD)
    for part in (name, *counters):
        key = _mix((key ^ part) + _GAMMA & _WORD)
    return key


def plain_words(key: int, count: int) -> list[int]:
    return [_mix(key + (i + 1) * _GAMMA & _WORD) for i in range(count)]


def plain_signs(key: int, count: int) -> np.ndarray:
    words = plain_words(key, -(-count // 64))
    return np.array([-1.0 if words[i // 64] >> i % 64 & 1 else 1.0 for i in range(count)])


@cache
def hadamard(size: int) -> np.ndarray:
    """Sylvester's construction, float64 `[size, size]`."""
    if size == 1:
        return np.ones((1, 1))
    half = hadamard(size // 2)
    return np.block([[half, half], [half, -half]])


def power_of_two(size: int) -> int:
    pad = 1
    while pad < size:
        pad *= 2
    return pad


def dense_phi(size: int, kept: int, seed: int, epoch: int = 0, layer: int = 0) -> np.ndarray:
    """Φ = 1/√m S H D P of one layer, float64 `[kept, size]`, entry by entry. Which rows are kept comes from `rng`,
    which has a transcription of its own in test_rng.py."""
    pad = power_of_two(size)
    signs = plain_signs(plain_stream(seed, "sketch-signs", epoch, layer), size)
    rows = rng.rows(plain_stream(seed, "sketch-rows", epoch, layer), pad.bit_length() - 1, kept)
    return hadamard(pad)[rows][:, :size] * signs / sqrt(kept)


# --- data and a model small enough for plain loops --------------------------------------------------------------------


def small_data(*counts: int) -> FederatedData:
    """Clients with that many training samples of 4 numbers; client k has none of class k of the four, nobody of class
    3."""
    random = np.random.default_rng(4)

    def drawn(client: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        held = [label for label in range(3) if label != client]
        labels = np.array([held[i % len(held)] for i in range(count)])
        return random.normal(size=(count, 4)) + labels[:, None], labels

    data = from_pairs([(drawn(client, count), drawn(client, 3)) for client, count in enumerate(counts)])
    return FederatedData(data.x, data.y, data.train, data.test, classes=4)


def small_module() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def worker_of(model: CohortModel, data: FederatedData, train: TrainSettings, seed: int) -> LocalWorker:
    """The worker of a federation, which makes it the way the engine does."""
    return Federation(METHODS["local"], METHODS["local"].Settings(), model, data, train, seed)._worker


def exact_module(params: Tensor) -> nn.Sequential:
    """The small module in float64 with the flat `params: [dim]`."""
    module = small_module().double()
    nn.utils.vector_to_parameters(params.double(), module.parameters())
    return module


def small_batches(
    data: FederatedData, client: int, phase: int, train: TrainSettings, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples (float64) and labels of a client's E steps of one phase."""
    held = data.train[client]
    walk = batch_positions(seed, client, len(held), phase * train.local_steps, train.local_steps, train.batch_size)
    for positions in walk:
        yield data.x[held[positions]].double(), data.y[held[positions]]


def exact_steps(
    params: Tensor, batches: Iterator[tuple[Tensor, Tensor]], train: TrainSettings, extra: Callable[..., Tensor]
) -> Tensor:
    """Plain SGD on cross-entropy + μ/2 ‖θ‖² + extra(flat parameters, features, labels), float64, by autograd."""
    module = exact_module(params)
    for x, y in batches:
        features = module[:-1](x)
        flat = torch.cat([p.reshape(-1) for p in module.parameters()])
        decay = train.weight_decay / 2 * (flat**2).sum()
        loss = nn.functional.cross_entropy(module[-1](features), y) + decay + extra(flat, features, y)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= train.learning_rate * gradient
    return nn.utils.parameters_to_vector(module.parameters()).detach()


# --- a small federation on digits -------------------------------------------------------------------------------------

CLIENTS = 5
HIDDEN = 20
LAYERS = (64 * HIDDEN + HIDDEN, HIDDEN * 10 + 10)  # 1,300 and 210 parameters
DIM = sum(LAYERS)
SEED = 3


@cache
def digits() -> FederatedData:
    pool = load("digits")
    return from_pool(pool.x, pool.y, CLIENTS, 0.5, seed=0)


def federation(
    method: str,
    *,
    seed: int = SEED,
    cohort_size: int = 0,
    link: Link = perfect_link,
    train: TrainSettings | None = None,
    module: nn.Module | None = None,
    **settings: Any,
) -> Federation:
    data, chosen = digits(), METHODS[method]
    own = module or build("dnn", data.shape, data.classes, HIDDEN, key=1)
    model = CohortModel(own, torch.device("cpu"))
    how = train or TrainSettings(local_steps=3, batch_size=16, learning_rate=0.1, momentum=0.0, weight_decay=1e-4)
    return Federation(chosen, chosen.Settings(**settings), model, data, how, seed, cohort_size=cohort_size, link=link)


@dataclass
class Post:
    """A link that keeps what clients send."""

    frames: list[bytes] = field(default_factory=list)

    def __call__(self, data: bytes, sender: int) -> bytes:
        self.frames.append(data)
        return data

    @property
    def payloads(self) -> list[bytes]:
        return [data[HEADER_BYTES:] for data in self.frames]


@dataclass(frozen=True)
class Sent:
    """One message as it was given to the encoder, and the frame that came out."""

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
def overheard() -> Iterator[list[Sent]]:
    """Every message of both directions that the engine encodes meanwhile."""
    heard: list[Sent] = []
    encode: Callable[..., bytes] = engine_exchange.frame

    def listening(message: Message, values: Any, *, round: int, sender: int, samples: int, digest: bytes) -> bytes:
        data = encode(message, values, round=round, sender=sender, samples=samples, digest=digest)
        heard.append(Sent(message, {name: np.array(v) for name, v in values.items()}, round, sender, digest, data))
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_exchange, "frame", listening)
        yield heard
