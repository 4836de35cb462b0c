"""Section 11.1 of the page: a run of `sketchvote`."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plain_client.fields import Field, Floats, Mask, MaskedBytes, Signs
from plain_client.frames import SERVER, Agreement, accept, common_lines, digest_text
from plain_client.numbers import allocated_sizes, f32, padded
from plain_client.sketching import sketch, transpose

UP, DOWN, MODEL = 0, 1, 3
ROOT = struct.unpack(">d", bytes.fromhex("3fe9884533d43651"))[0]  # sqrt(2 / π)


@dataclass(frozen=True)
class VoteRun(Agreement):
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
        votes = (Signs(sum(self.sizes)), Floats(len(self.layers), minimum=0.0))
        return (*votes, Mask(1), MaskedBytes(2, 8)) if kind == UP else votes

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
                for i, u in enumerate(transpose(own, self.seed, round // self.refresh, index, size)):
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
    """One client through all rounds: w, its residual, and the number of answers it knows."""

    def __init__(self, run: VoteRun, id: int, samples: int) -> None:
        self.run, self.id, self.samples = run, id, samples
        self.w, self.residual = list(run.initial), [0.0] * len(run.initial)
        self.answers_known = self.checked = 0

    def send(self, round: int, model: Sequence[float]) -> bytes:
        """`model` is θ_k, after local steps from w."""
        run, epoch = self.run, round // self.run.refresh
        x = [f32(f32(own - w) + e) for own, w, e in zip(model, self.w, self.residual, strict=True)]
        self.sketch = sketch(x, run.layers, run.sizes, run.seed, epoch)
        self.residual = x
        for index, ((offset, size), y) in enumerate(zip(run.layers, self.sketch, strict=True)):
            scale, share = f32(1 / math.sqrt(len(y))), f32(len(y) / padded(size))
            for i, u in enumerate(transpose(y, run.seed, epoch, index, size)):
                x[offset + i] = f32(x[offset + i] - f32(f32(u * scale) * share))
        due = run.check_every > 0 and round >= self.checked + run.check_every
        self.checked = round if due else self.checked
        votes = [[y for layer in self.sketch for y in layer], list(map(root_mean_square, self.sketch))]
        return run.frame(UP, round, self.id, self.samples, [*votes, [int(due)], model_digest(self.w)])

    def receive(self, answer: bytes) -> None:
        """The first answer that this client does not know: the one of this round, or one that it missed."""
        _, _, (votes, scales) = self.run.receiver(DOWN, self.answers_known, [SERVER]).accept(answer)
        self.w = self.run.moved(self.w, self.answers_known, votes, scales)
        self.answers_known += 1

    def receive_model(self, frame: bytes, round: int) -> None:
        """The model that results from the answers of all rounds before this one."""
        _, _, (self.w,) = self.run.receiver(MODEL, round - 1, [SERVER]).accept(frame)
        self.answers_known = round


class VoteServer:
    """The server through all rounds: w and all its answers. A client whose tracked model differs is `out_of_sync` until
    it is known to have received an answer again."""

    def __init__(self, run: VoteRun) -> None:
        self.run, self.w = run, list(run.initial)
        self.answers: list[bytes] = []
        self.refused: list[str] = []
        self.out_of_sync: set[int] = set()

    @property
    def round(self) -> int:
        return len(self.answers)

    def count_votes(self, clients: Collection[int], frames: Iterable[bytes]) -> tuple[bytes, list[float]]:
        """The answer to the messages of a round, and the model after it, which `finish` makes the server's."""
        accepted = accept(self.run.receiver(UP, self.round, clients), frames, self.refused)
        own, counted = model_digest(self.w), []
        for sender, samples, (signs, scales, checked, digest) in accepted:
            if checked[0] and digest != own and self.round:
                self.out_of_sync.add(sender)
            else:
                counted.append((samples, self.run.by_layer(signs), scales))
        votes, medians = [], []
        for layer, m in enumerate(self.run.sizes):
            voting = [(n, signs[layer]) for n, signs, scales in counted if scales[layer] > 0]
            for i in range(m):
                up = sum(n for n, signs in voting if signs[i] > 0)
                votes.append(1.0 if up >= sum(n for n, _ in voting) - up else -1.0)
            medians.append(weighted_median([n for n, _, _ in counted], [scales[layer] for _, _, scales in counted]))
        answer = self.run.frame(DOWN, self.round, SERVER, 0, [votes, medians])
        return answer, self.run.moved(self.w, self.round, votes, medians)

    def catch_up(self, client: int, answers_known: int) -> list[bytes]:
        """What a client that knows that many answers is sent before the answer of this round (section 12)."""
        model = self.run.frame(MODEL, self.round - 1, SERVER, 0, [self.w]) if self.round else b""
        if client in self.out_of_sync:
            return [model]
        missed = self.answers[answers_known:]
        return missed if sum(map(len, missed)) <= len(model) else [model]

    def finish(self, answer: bytes, model: list[float], receivers: Collection[int]) -> None:
        """End the round; `receivers` are the clients known to have received its answer."""
        self.answers.append(answer)
        self.w = model
        self.out_of_sync -= set(receivers)
