"""Sections 11.2 and 12 of the page: a run of `sketchmean`, and catching up in the fewest bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plain_client.averages import add_sparse, stc_fields, ternary
from plain_client.fields import Count, Field, Floats, Mask, MaskedBytes, MaskedRows, Places, Signs
from plain_client.frames import SERVER, Agreement, accept, common_lines, digest_text
from plain_client.numbers import allocated_sizes, f32, signs, stream
from plain_client.sketching import kept_rows, sketch
from plain_client.sketchvote import DOWN, MODEL, ROOT, UP, model_digest, root_mean_square

CHANGES, DIFFERENCES = 5, 7


@dataclass(frozen=True)
class MeanRun(Agreement):
    """A run of `sketchmean`; only the server uses `gain`."""

    ratio: float = 0.1
    answer: float = 0.005
    allocation: float = 1.0
    refresh: int = 1
    check_every: int = 50
    learning_rate: float = 0.1
    gain: float = 3.0

    def text(self) -> str:
        names = ("ratio", "answer", "allocation", "refresh", "check_every")
        return digest_text(
            common_lines("sketchmean", self.layers, self.classes, self.seed, self.initial)
            | {f"method.{name}": getattr(self, name) for name in names}
            | {"agreement.rows": ",".join(map(str, self.sizes)), "agreement.learning_rate": self.learning_rate}
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return allocated_sizes([size for _, size in self.layers], self.ratio, self.allocation)

    @property
    def start(self) -> list[float]:
        """The first S."""
        return [f32(self.learning_rate / math.sqrt(m)) for m in self.sizes]

    @property
    def answer_entries(self) -> int:
        return max(1, math.floor(self.answer * len(self.initial)))

    def fields(self, kind: int) -> tuple[Field, ...]:
        n, scale = len(self.initial), Floats(len(self.layers), minimum=0.0)
        if kind == UP:
            return Signs(sum(self.sizes)), Mask(len(self.layers)), Mask(1), MaskedBytes(2, 8)
        if kind == DOWN:
            return (*stc_fields(self.answer_entries, n), scale)
        return (Floats(n), scale) if kind == MODEL else (Count(), Places(n), MaskedRows(1, n, 1), scale)


class MeanClient:
    """One client through all rounds: w, S, and the number of answers it knows."""

    def __init__(self, run: MeanRun, id: int, samples: int) -> None:
        self.run, self.id, self.samples = run, id, samples
        self.w, self.scales = list(run.initial), run.start
        self.answers_known = self.checked = 0

    def send(self, round: int, model: Sequence[float]) -> bytes:
        run = self.run
        x = [f32(own - w) for own, w in zip(model, self.w, strict=True)]
        votes, above = [], []
        for layer, y in enumerate(sketch(x, run.layers, run.sizes, run.seed, round // run.refresh)):
            coins = signs(stream(run.seed, "sketchmean-coin", round, self.id, layer), len(y))
            votes += [value if value != 0 else coin for value, coin in zip(y, coins, strict=True)]
            above.append(int(root_mean_square(y) > self.scales[layer]))
        due = run.check_every > 0 and round >= self.checked + run.check_every
        self.checked = round if due else self.checked
        return run.frame(UP, round, self.id, self.samples, [votes, above, [int(due)], model_digest(self.w)])

    def receive(self, data: bytes) -> None:
        """An answer, or a frame that replaces all answers up to its round."""
        kind, (round,) = data[5], struct.unpack_from("<I", data, 8)
        expected = self.answers_known if kind == DOWN else round
        _, _, values = self.run.receiver(kind, expected, [SERVER]).accept(data)
        if kind == DOWN:
            self.w = add_sparse(self.w, 1.0, values[:3])
        elif kind == MODEL:
            self.w = values[0]
        else:
            (since,), places, new, _ = values
            assert kind == DIFFERENCES or since <= self.answers_known
            base = self.w if kind == CHANGES else self.run.initial
            self.w = [row[0] if chosen else old for chosen, row, old in zip(places, new, base, strict=True)]
        self.scales, self.answers_known = values[-1], round + 1


class MeanServer:
    """The server through all rounds: w, S, z, and all models and answers."""

    def __init__(self, run: MeanRun) -> None:
        self.run, self.scales, self.states = run, run.start, [0] * len(run.layers)
        self.z = [0.0] * len(run.initial)
        self.history, self.answers = [list(run.initial)], list[bytes]()
        self.refused: list[str] = []
        self.out_of_sync: set[int] = set()

    @property
    def round(self) -> int:
        return len(self.answers)

    @property
    def w(self) -> list[float]:
        return self.history[-1]

    def reply(self, clients: Collection[int], frames: Iterable[bytes]) -> bytes:
        """The answer to the messages of a round; w, S and z move by it."""
        run, own, counted = self.run, model_digest(self.w), []
        for sender, samples, (votes, above, checked, digest) in accept(
            run.receiver(UP, self.round, clients), frames, self.refused
        ):
            if checked[0] and digest != own and self.round:
                self.out_of_sync.add(sender)
            else:
                counted.append((samples, votes, above))
        total, at = sum(n for n, _, _ in counted), 0
        for layer, ((offset, size), m) in enumerate(zip(run.layers, run.sizes, strict=True)):
            up = sum(n for n, _, above in counted if above[layer])
            lean = (2 * up - total) / total if total else 0.0
            sign, state = (lean > 0) - (lean < 0), self.states[layer]
            settled = state == 2 or sign == 0 or state not in (0, sign)
            self.states[layer] = 2 if settled else sign
            if settled or lean > 0:
                sums = [sum(n * int(votes[at + j]) for n, votes, _ in counted) for j in range(m)]
                factor = ROOT * (self.scales[layer] / max(1, total)) / math.sqrt(m)
                for i, u in enumerate(self.transpose(sums, layer, size)):
                    self.z[offset + i] = f32(self.z[offset + i] + run.gain * (u * factor))
            moving = self.scales[layer] * (1 + (0.2 if settled else 0.7) * lean)
            first = run.start[layer]
            self.scales[layer] = f32(min(max(moving, first * 2.0**-20), first * 2.0**40))
            at += m
        sent = ternary(self.z, run.answer_entries)
        self.z = add_sparse(self.z, -1.0, sent)
        answer = run.frame(DOWN, self.round, SERVER, 0, [*sent, self.scales])
        self.history.append(add_sparse(self.w, 1.0, sent))
        self.answers.append(answer)
        return answer

    def transpose(self, sums: Sequence[int], layer: int, size: int) -> list[int]:
        """The transpose of the sketch in integers, entry by entry of H, so that no order of stages matters."""
        epoch = self.round // self.run.refresh
        rows = kept_rows(self.run.seed, epoch, layer, size, len(sums))
        flips = signs(stream(self.run.seed, "sketch-signs", epoch, layer), size)
        pairs = list(zip(rows, sums, strict=True))
        return [
            int(flip) * sum(-value if (row & i).bit_count() % 2 else value for row, value in pairs)
            for i, flip in enumerate(flips)
        ]

    def catch_up(self, client: int, answers_known: int, scales: Sequence[float]) -> list[bytes]:
        """What a client that knows that many answers is sent before the last answer; `scales` are S before it."""
        before, last = self.history[:-1], self.round - 2
        if answers_known > last and client not in self.out_of_sync:
            return []
        w = before[-1]

        def entries_frame(kind: int, since: int, places: list[int]) -> list[bytes]:
            rows = [[value] for value in w]
            return [self.run.frame(kind, last, SERVER, 0, [[since], places, rows, scales])]

        differing = [int(bits(new) != bits(old)) for new, old in zip(w, before[0], strict=True)]
        forms = [entries_frame(DIFFERENCES, 0, differing), [self.run.frame(MODEL, last, SERVER, 0, [w, scales])]]
        if client not in self.out_of_sync:
            changed = [int(len(set(map(bits, own))) > 1) for own in zip(*before[answers_known:], strict=True)]
            forms = [self.answers[answers_known:-1], entries_frame(CHANGES, answers_known, changed), *forms]
        return min(forms, key=lambda frames: sum(map(len, frames)))


def bits(value: float) -> bytes:
    return struct.pack("<f", value)
