"""Section 10 of the page: a run of `pfedlms`, message by message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plain_client.fields import Field, Floats, Symbols
from plain_client.frames import SERVER, Agreement, accept, common_lines, digest_text
from plain_client.numbers import Table, sketch_size
from plain_client.quantising import pool, pool_medians, statistics, symbols_of, thresholds_of, vote
from plain_client.sketching import sketch


@dataclass(frozen=True)
class Run(Agreement):
    """A run of `pfedlms`."""

    thresholds: int = 7
    ratio: float = 0.1
    strength: float = 0.05
    smoothing: float = 0.1
    refresh: int = 1
    spacing: str = "quantile"
    layerwise: bool = True
    pooling: str = "mean"  # used by the server only, so not in the text

    def text(self) -> str:
        names = ("thresholds", "ratio", "strength", "smoothing", "refresh", "spacing", "layerwise")
        return digest_text(
            common_lines("pfedlms", self.layers, self.classes, self.seed, self.initial)
            | {f"method.{name}": getattr(self, name) for name in names}
        )

    @property
    def table(self) -> Table:
        """The layers that the sketch uses."""
        return self.layers if self.layerwise else [(0, sum(size for _, size in self.layers))]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sketch_size(size, self.ratio) for _, size in self.table)

    def fields(self, kind: int) -> tuple[Field, ...]:
        layers = len(self.table)
        if kind < 2:
            return Floats(layers), Floats(layers, minimum=0.0)
        return (Symbols(self.sizes, self.thresholds + 1),)


class Client:
    """One client in one round; `model` is θ_k."""

    def __init__(self, run: Run, id: int, samples: int, round: int, model: Sequence[float]) -> None:
        self.run, self.id, self.samples, self.round = run, id, samples, round
        self.sketch = sketch(model, run.table, run.sizes, run.seed, round // run.refresh)

    def send_statistics(self) -> bytes:
        means, variances = zip(*map(statistics, self.sketch), strict=True)
        return self._send(0, [means, variances])

    def receive_thresholds(self, reply: bytes) -> None:
        _, _, (means, deviations) = self.run.receiver(1, self.round, [SERVER]).accept(reply)
        self.thresholds = [
            thresholds_of(mean, deviation, self.run.thresholds, self.run.spacing)
            for mean, deviation in zip(means, deviations, strict=True)
        ]

    def send_symbols(self) -> bytes:
        self.symbols = [q for y, tau in zip(self.sketch, self.thresholds, strict=True) for q in symbols_of(y, tau)]
        return self._send(2, [self.symbols])

    def receive_consensus(self, reply: bytes) -> None:
        _, _, (self.consensus,) = self.run.receiver(3, self.round, [SERVER]).accept(reply)

    def _send(self, kind: int, values: Sequence) -> bytes:
        return self.run.frame(kind, self.round, self.id, self.samples, values)


class Server:
    """The server in one round; refused frames are left out and listed in `refused`."""

    def __init__(self, run: Run, clients: Collection[int], round: int) -> None:
        self.run, self.clients, self.round = run, clients, round
        self.refused: list[str] = []

    def pool_statistics(self, frames: Iterable[bytes]) -> bytes:
        accepted = accept(self.run.receiver(0, self.round, self.clients), frames, self.refused)
        samples = [samples for _, samples, _ in accepted]
        pooled = []
        for layer in range(len(self.run.table)):
            means = [values[0][layer] for _, _, values in accepted]
            variances = [values[1][layer] for _, _, values in accepted]
            pooled.append((pool_medians if self.run.pooling == "median" else pool)(samples, means, variances))
        return self._reply(1, list(zip(*pooled, strict=True)))

    def count_votes(self, frames: Iterable[bytes]) -> bytes:
        accepted = accept(self.run.receiver(2, self.round, self.clients), frames, self.refused)
        ballots = [values[0] for _, _, values in accepted]
        return self._reply(3, [vote([samples for _, samples, _ in accepted], ballots, self.run.thresholds)])

    def _reply(self, kind: int, values: Sequence) -> bytes:
        return self.run.frame(kind, self.round, SERVER, 0, values)
