"""Section 11.1 of the page: a run of `sketchvote`."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plain_client.fields import Field, Floats, Mask, MaskedBytes, Signs
from plain_client.frames import SERVER, Known, accept, common_lines, digest_text
from plain_client.numbers import allocated_sizes, f32, padded
from plain_client.sketching import sketch, spread

UP, DOWN, MODEL = 0, 1, 3
ROOT = struct.unpack(">d", bytes.fromhex("3fe9884533d43651"))[0]  # sqrt(2 / π)


@dataclass(frozen=True)
class VoteRun(Known):
    """A run of `sketchvote`."""

    ratio: float = 0.1
    gain: float = 1.0
    allocation: float = 1.0
    refresh: int = 1
    check_every: int = 50

    def text(self) -> str:
        names = ("ratio", "gain", "allocation", "refresh", "check_every")
        return digest_text(
            common_lines("sketchvote", self.layers, self.classes, self.seed, self.initial)
            | {f"method.{name}": getattr(self, name) for name in names}
            | {"agreement.rows": ",".join(map(str, self.sizes))}
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return allocated_sizes([size for _, size in self.layers], self.ratio, self.allocation)

    @property
    def factors(self) -> list[float]:
        """f of every layer."""
        pads = [padded(size) for _, size in self.layers]
        return [self.gain * ROOT * math.sqrt(m) / pad for m, pad in zip(self.sizes, pads, strict=True)]

    def fields(self, kind: int) -> tuple[Field, ...]:
        if kind == MODEL:
            return (Floats(len(self.initial)),)
        said = (Signs(sum(self.sizes)), Floats(len(self.layers), minimum=0.0))
        return (*said, Mask(1), MaskedBytes(2, 8)) if kind == UP else said

    def by_layer(self, entries: Sequence) -> list[Sequence]:
        """A whole sketch, cut into its layers."""
        parts, at = [], 0
        for m in self.sizes:
            parts.append(entries[at : at + m])
            at += m
        return parts

    def moved(self, w: Sequence[float], round: int, votes: Sequence[float], scales: Sequence[float]) -> list[float]:
        """w after the answer of a round."""
        after = list(w)
        for index, ((offset, size), own) in enumerate(zip(self.layers, self.by_layer(votes), strict=True)):
            c = f32(scales[index] * self.factors[index])
            if c != 0:
                for i, u in enumerate(spread(own, self.seed, round // self.refresh, index, size)):
                    after[offset + i] = f32(w[offset + i] + f32(c * u))
        return after


def model_digest(w: Sequence[float]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(w)}f", *w)).digest()[:8]


def root_mean_square(entries: Sequence[float]) -> float:
    return f32(math.sqrt(math.fsum(y * y for y in entries) / len(entries)))


def weighted_median(samples: Sequence[int], values: Sequence[float]) -> float:
    voting = [(x, n) for x, n in zip(values, samples, strict=True) if x > 0]
    for x in sorted(x for x, _ in voting):
        if 2 * sum(n for other, n in voting if other <= x) >= sum(n for _, n in voting):
            return x
    return 0.0


class VoteClient:
    """One client through all rounds: w, its residual, and how many answers it has heard."""

    def __init__(self, run: VoteRun, id: int, samples: int) -> None:
        self.run, self.id, self.samples = run, id, samples
        self.w, self.residual = list(run.initial), [0.0] * len(run.initial)
        self.heard = self.checked = 0

    def send(self, round: int, model: Sequence[float]) -> bytes:
        """`model` is θ_k, after local steps from w."""
        run, epoch = self.run, round // self.run.refresh
        x = [f32(f32(own - w) + e) for own, w, e in zip(model, self.w, self.residual, strict=True)]
        self.sketch = sketch(x, run.layers, run.sizes, run.seed, epoch)
        self.residual = x
        for index, ((offset, size), y) in enumerate(zip(run.layers, self.sketch, strict=True)):
            scale, share = f32(1 / math.sqrt(len(y))), f32(len(y) / padded(size))
            for i, u in enumerate(spread(y, run.seed, epoch, index, size)):
                x[offset + i] = f32(x[offset + i] - f32(f32(u * scale) * share))
        due = run.check_every > 0 and round >= self.checked + run.check_every
        self.checked = round if due else self.checked
        said = [[y for layer in self.sketch for y in layer], list(map(root_mean_square, self.sketch))]
        return run.frame(UP, round, self.id, self.samples, [*said, [int(due)], model_digest(self.w)])

    def hear(self, answer: bytes) -> None:
        """The answer of the round that this client lacks next, be it of now or one that was missed."""
        _, _, (votes, scales) = self.run.receiver(DOWN, self.heard, [SERVER]).accept(answer)
        self.w = self.run.moved(self.w, self.heard, votes, scales)
        self.heard += 1

    def hear_model(self, frame: bytes, round: int) -> None:
        """The model that the answers of all rounds below this one lead to."""
        _, _, (self.w,) = self.run.receiver(MODEL, round - 1, [SERVER]).accept(frame)
        self.heard = round


class VoteServer:
    """The server through all rounds: w, and all its answers. Who was found to track another model is `astray` until it
    is known to have heard again."""

    def __init__(self, run: VoteRun) -> None:
        self.run, self.w = run, list(run.initial)
        self.answers: list[bytes] = []
        self.refused: list[str] = []
        self.astray: set[int] = set()

    @property
    def round(self) -> int:
        return len(self.answers)

    def count_votes(self, clients: Collection[int], frames: Iterable[bytes]) -> tuple[bytes, list[float]]:
        """The answer to the messages of a round, and the model it leads to: `finish` makes it the server's."""
        accepted = accept(self.run.receiver(UP, self.round, clients), frames, self.refused)
        own, heard = model_digest(self.w), []
        for sender, samples, (said, scales, checked, digest) in accepted:
            if checked[0] and digest != own and self.round:
                self.astray.add(sender)
            else:
                heard.append((samples, self.run.by_layer(said), scales))
        votes, medians = [], []
        for layer, m in enumerate(self.run.sizes):
            voting = [(n, said[layer]) for n, said, scales in heard if scales[layer] > 0]
            for i in range(m):
                up = sum(n for n, said in voting if said[i] > 0)
                votes.append(1.0 if up >= sum(n for n, _ in voting) - up else -1.0)
            medians.append(weighted_median([n for n, _, _ in heard], [scales[layer] for _, _, scales in heard]))
        answer = self.run.frame(DOWN, self.round, SERVER, 0, [votes, medians])
        return answer, self.run.moved(self.w, self.round, votes, medians)

    def catch_up(self, client: int, heard: int) -> list[bytes]:
        """What a client that has heard so many answers is sent before the answer of this round (section 12)."""
        model = self.run.frame(MODEL, self.round - 1, SERVER, 0, [self.w]) if self.round else b""
        if client in self.astray:
            return [model]
        missed = self.answers[heard:]
        return missed if sum(map(len, missed)) <= len(model) else [model]

    def finish(self, answer: bytes, model: list[float], heard: Collection[int]) -> None:
        """End the round; `heard` are those who are known to have heard its answer."""
        self.answers.append(answer)
        self.w = model
        self.astray -= set(heard)
