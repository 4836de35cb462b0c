"""A second implementation of docs/protocol.md, written from that page alone: plain Python, standard library only.

It is slow and short on purpose. Section numbers are those of the page.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
SERVER = 0xFFFFFFFF
HEADER = struct.Struct("<4sBBHIIIQ8s")


class Refused(Exception):
    """A frame was refused; `error` is the name in the table of section 8."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


# Section 1: conventions.


def f32(value: float) -> float:
    """The nearest float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


# Section 2: the layer table.

Table = Sequence[tuple[int, int]]


def padded(size: int) -> int:
    pad = 1
    while pad < size:
        pad *= 2
    return pad


def sketch_size(size: int, ratio: float) -> int:
    return max(1, math.floor(ratio * padded(size)))


def allocated_sizes(sizes: Sequence[int], ratio: float, allocation: float) -> tuple[int, ...]:
    """m of every layer of `sketchvote` (section 11.1)."""
    if allocation == 1:
        return tuple(sketch_size(size, ratio) for size in sizes)
    pads = [padded(size) for size in sizes]
    powers = [math.pow(pad, allocation) for pad in pads]
    whole = 0.0
    for power in powers:
        whole = whole + power
    shares = [ratio * sum(pads) * power / whole for power in powers]
    return tuple(min(pad, max(1, math.floor(share))) for pad, share in zip(pads, shares, strict=True))


# Section 3: random numbers.


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def fnv1a(text: str) -> int:
    h = 0xCBF29CE484222325
    for byte in text.encode("ascii"):
        h = ((h ^ byte) * 0x100000001B3) & WORD
    return h


def stream(seed: int, purpose: str, *counters: int) -> int:
    k = mix((seed + GAMMA) & WORD)
    for part in (fnv1a(purpose), *counters):
        k = mix(((k ^ part) + GAMMA) & WORD)
    return k


def word(key: int, i: int) -> int:
    return mix((key + (i + 1) * GAMMA) & WORD)


def signs(key: int, count: int) -> list[float]:
    words = [word(key, i) for i in range((count + 63) // 64)]
    return [-1.0 if words[i // 64] >> (i % 64) & 1 else 1.0 for i in range(count)]


def row(key: int, bits: int, i: int) -> int:
    shift = max(1, (bits + 1) // 2)
    x = i
    for j in range(6):
        a, c = word(key, 2 * j) | 1, word(key, 2 * j + 1)
        x = (a * x + c) % (1 << bits)
        x ^= x >> shift
    return x


# Section 4: the sketch.


def transform(values: Iterable[float]) -> list[float]:
    x = list(values)
    h = 1
    while h < len(x):
        for i in range(len(x)):
            if (i // h) % 2 == 0:
                a, b = x[i], x[i + h]
                x[i], x[i + h] = f32(a + b), f32(a - b)
        h *= 2
    return x


def kept_rows(seed: int, epoch: int, index: int, size: int, m: int) -> list[int]:
    key, bits = stream(seed, "sketch-rows", epoch, index), padded(size).bit_length() - 1
    return [row(key, bits, j) for j in range(m)]


def sketch(model: Sequence[float], table: Table, sizes: Sequence[int], seed: int, epoch: int) -> list[list[float]]:
    """One list of entries for each layer; `sizes` has their numbers m."""
    layers = []
    for index, ((offset, size), m) in enumerate(zip(table, sizes, strict=True)):
        flips = signs(stream(seed, "sketch-signs", epoch, index), size)
        x = [model[offset + i] * flips[i] for i in range(size)] + [0.0] * (padded(size) - size)
        x, scale = transform(x), f32(1 / math.sqrt(m))
        layers.append([f32(x[i] * scale) for i in kept_rows(seed, epoch, index, size, m)])
    return layers


def spread(entries: Sequence[float], seed: int, epoch: int, index: int, size: int) -> list[float]:
    """The way back of one layer, without the scale: the transform of the entries in their rows, with signs."""
    flips = signs(stream(seed, "sketch-signs", epoch, index), size)
    x = [0.0] * padded(size)
    for i, entry in zip(kept_rows(seed, epoch, index, size, len(entries)), entries, strict=True):
        x[i] = entry
    return [value * flip for value, flip in zip(transform(x), flips, strict=False)]


# Section 5: statistics, thresholds, symbols.


def statistics(entries: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(entries) / len(entries)
    variance = math.fsum((y - mean) ** 2 for y in entries) / len(entries)
    return f32(mean), f32(variance)


def pool(samples: Sequence[int], means: Sequence[float], variances: Sequence[float]) -> tuple[float, float]:
    """One layer of all clients, in ascending order of ids."""
    total = sum(samples)
    mean = 0.0
    for n, m in zip(samples, means, strict=True):
        mean = mean + n * m
    mean = mean / total
    square = 0.0
    for n, m, s in zip(samples, means, variances, strict=True):
        d = m - mean
        square = square + n * (s + d * d)
    return f32(mean), f32(math.sqrt(square / total))


def quantiles(thresholds: int, spacing: str = "quantile") -> list[float]:
    if spacing == "lloyd-max":
        return lloyd_max_boundaries(thresholds + 1)
    return [f32(NormalDist().inv_cdf(t / (thresholds + 1))) for t in range(1, thresholds + 1)]


def lloyd_max_boundaries(levels: int) -> list[float]:
    """Fixed point of: boundaries halfway between centroids, centroids at the mean of the normal in their cell."""
    normal = NormalDist()
    bounds = [normal.inv_cdf(i / levels) for i in range(1, levels)]
    for _ in range(5000):
        heights = [0.0, *map(normal.pdf, bounds), 0.0]
        shares = [0.0, *map(normal.cdf, bounds), 1.0]
        means = [(heights[i] - heights[i + 1]) / (shares[i + 1] - shares[i]) for i in range(levels)]
        bounds = [(means[i] + means[i + 1]) / 2 for i in range(levels - 1)]
    return [f32((a - b) / 2) for a, b in zip(bounds, reversed(bounds), strict=True)]


def thresholds_of(mean: float, deviation: float, count: int, spacing: str = "quantile") -> list[float]:
    return [f32(mean + deviation * z) for z in quantiles(count, spacing)]


def symbols_of(entries: Iterable[float], thresholds: Sequence[float]) -> list[int]:
    return [sum(y >= tau for tau in thresholds) for y in entries]


def vote(samples: Sequence[int], ballots: Sequence[Sequence[int]], thresholds: int) -> list[int]:
    total = sum(samples)
    result = []
    for chosen in zip(*ballots, strict=True):
        above = [sum(n for n, q in zip(samples, chosen, strict=True) if q >= t) for t in range(1, thresholds + 1)]
        result.append(sum(a >= total - a for a in above))
    return result


# Section 6: packed symbols.


def width(count: int, levels: int) -> int:
    return (levels**count - 1).bit_length()


def block_size(levels: int) -> int:
    best = 1
    for s in range(2, 57):
        if width(s, levels) <= 56 and width(s, levels) * best <= width(best, levels) * s:
            best = s
    return best


def packed_size(count: int, levels: int) -> int:
    s = block_size(levels)
    return ((count // s) * width(s, levels) + width(count % s, levels) + 7) // 8


def pack(symbols: Sequence[int], levels: int) -> bytes:
    s, bits, at = block_size(levels), 0, 0
    for start in range(0, len(symbols), s):
        block = symbols[start : start + s]
        bits |= sum(q * levels**i for i, q in enumerate(block)) << at
        at += width(len(block), levels)
    return bits.to_bytes((at + 7) // 8, "little")


def unpack(data: bytes, count: int, levels: int) -> list[int]:
    if len(data) != packed_size(count, levels):
        raise Refused("decode")
    s, bits, symbols = block_size(levels), int.from_bytes(data, "little"), []
    while len(symbols) < count:
        n = min(s, count - len(symbols))
        value, bits = bits % (1 << width(n, levels)), bits >> width(n, levels)
        if value >= levels**n:
            raise Refused("decode")
        for _ in range(n):
            symbols.append(value % levels)
            value //= levels
    if bits:
        raise Refused("decode")
    return symbols


# Section 7: fields. Each has `largest` and `size(known)` in bytes, `write(value, known)` and `read(data, known)`.


@dataclass(frozen=True)
class Symbols:
    segments: tuple[int, ...]
    levels: int

    @property
    def largest(self) -> int:
        return sum(packed_size(count, self.levels) for count in self.segments)

    def size(self, known: list) -> int:
        return self.largest

    def write(self, value: Sequence[int], known: list) -> bytes:
        parts, at = [], 0
        for count in self.segments:
            parts.append(pack(value[at : at + count], self.levels))
            at += count
        return b"".join(parts)

    def read(self, data: bytes, known: list) -> list[int]:
        symbols, at = [], 0
        for count in self.segments:
            length = packed_size(count, self.levels)
            symbols += unpack(data[at : at + length], count, self.levels)
            at += length
        return symbols


@dataclass(frozen=True)
class Floats:
    count: int
    minimum: float = -math.inf

    @property
    def largest(self) -> int:
        return 4 * self.count

    def size(self, known: list) -> int:
        return self.largest

    def write(self, value: Sequence[float], known: list) -> bytes:
        return struct.pack(f"<{self.count}f", *value)

    def read(self, data: bytes, known: list) -> list[float]:
        values = list(struct.unpack(f"<{self.count}f", data))
        if not all(math.isfinite(x) and x >= self.minimum for x in values):
            raise Refused("decode")
        return values


@dataclass(frozen=True)
class Mask:
    count: int

    @property
    def largest(self) -> int:
        return (self.count + 7) // 8

    def size(self, known: list) -> int:
        return self.largest

    def write(self, value: Sequence[int], known: list) -> bytes:
        return pack(value, 2)

    def read(self, data: bytes, known: list) -> list[int]:
        return unpack(data, self.count, 2)


@dataclass(frozen=True)
class Signs(Mask):
    def write(self, value: Sequence[float], known: list) -> bytes:
        return pack([int(x >= 0) for x in value], 2)

    def read(self, data: bytes, known: list) -> list[float]:
        return [1.0 if bit else -1.0 for bit in unpack(data, self.count, 2)]


@dataclass(frozen=True)
class MaskedRows:
    mask: int  # position of the mask among the fields
    count: int
    width: int

    @property
    def largest(self) -> int:
        return 4 * self.count * self.width

    def size(self, known: list) -> int:
        return 4 * self.width * sum(known[self.mask])

    def write(self, value: Sequence[Sequence[float]], known: list) -> bytes:
        return b"".join(
            Floats(self.width).write(r, known) for r, yes in zip(value, known[self.mask], strict=True) if yes
        )

    def read(self, data: bytes, known: list) -> list[list[float]]:
        sent = Floats(self.width * sum(known[self.mask])).read(data, known)
        rows = []
        for yes in known[self.mask]:
            rows.append(sent[: self.width] if yes else [0.0] * self.width)
            sent = sent[self.width :] if yes else sent
        return rows


@dataclass(frozen=True)
class Positions:
    count: int
    places: int

    @property
    def bits(self) -> int:
        x, b = (self.places - self.count) / self.places, 0
        while x >= 0.6180339887498949:
            x, b = x * x, b + 1
        return b

    @property
    def largest(self) -> int:
        return (self.count * (self.bits + 1) + (self.places - self.count) // 2**self.bits + 7) // 8

    def write(self, value: Sequence[int], known: list) -> bytes:
        stream, at, before = 0, 0, -1
        for position in value:
            ones, rest = divmod(position - before - 1, 2**self.bits)
            stream |= ((1 << ones) - 1 | rest << ones + 1) << at
            at += ones + 1 + self.bits
            before = position
        return stream.to_bytes((at + 7) // 8, "little")

    def codes(self, data: bytes) -> tuple[list[int], int]:
        """The gaps at the beginning of `data`, and the bits they take."""
        stream, at, gaps = int.from_bytes(data, "little"), 0, []
        for _ in range(self.count):
            ones = 0
            while stream >> at + ones & 1:
                ones += 1
            rest = (stream >> at + ones + 1) % 2**self.bits
            at += ones + 1 + self.bits
            if at > 8 * len(data):
                raise Refused("truncated")
            gaps.append(ones * 2**self.bits + rest)
        return gaps, at

    def read(self, data: bytes, known: list) -> list[int]:
        gaps, end = self.codes(data)
        positions, at = [], -1
        for gap in gaps:
            at += gap + 1
            positions.append(at)
        if at >= self.places or int.from_bytes(data, "little") >> end:
            raise Refused("decode")
        return positions


@dataclass(frozen=True)
class MaskedBytes:
    mask: int  # position of the mask, of one thing, among the fields
    count: int

    @property
    def largest(self) -> int:
        return self.count

    def size(self, known: list) -> int:
        return self.count * known[self.mask][0]

    def write(self, value: bytes, known: list) -> bytes:
        return value[: self.size(known)]

    def read(self, data: bytes, known: list) -> bytes:
        return data or bytes(self.count)


Field = Symbols | Floats | Mask | MaskedRows | MaskedBytes | Positions


def write_payload(fields: Sequence[Field], values: Sequence) -> bytes:
    return b"".join(field.write(value, list(values)) for field, value in zip(fields, values, strict=True))


def read_payload(fields: Sequence[Field], payload: bytes) -> list:
    known, at = [], 0
    for field in fields:
        size = (field.codes(payload[at:])[1] + 7) // 8 if isinstance(field, Positions) else field.size(known)
        if len(payload) - at < size:
            raise Refused("truncated")
        known.append(field.read(payload[at : at + size], known))
        at += size
    if at != len(payload):
        raise Refused("oversized")
    return known


# Section 8: frames.


def write_frame(kind: int, round: int, sender: int, samples: int, digest: bytes, payload: bytes) -> bytes:
    header = HEADER.pack(b"PFLM", 1, kind, 0, round, sender, samples, len(payload), digest)
    return header + struct.pack("<I", zlib.crc32(header + payload)) + payload


class Receiver:
    """Takes one kind of message of one round, once from each sender."""

    def __init__(self, kind: int, fields: Sequence[Field], round: int, digest: bytes, senders: Collection[int]) -> None:
        self.kind, self.fields, self.round, self.digest, self.senders = kind, fields, round, digest, senders
        self.seen: set[int] = set()

    def accept(self, data: bytes) -> tuple[int, int, list]:
        """(sender, samples, values) of a good frame."""
        if len(data) < 40:
            raise Refused("truncated")
        magic, version, kind, reserved, round, sender, samples, length, digest = HEADER.unpack(data[:36])
        payload = data[40:]
        checks = [
            (magic == b"PFLM", "magic"),
            (version == 1, "version"),
            (length <= sum(field.largest for field in self.fields) and len(payload) <= length, "oversized"),
            (len(payload) >= length, "truncated"),
            (struct.unpack("<I", data[36:40])[0] == zlib.crc32(data[:36] + payload), "checksum"),
            (reserved == 0, "decode"),
            (digest == self.digest, "digest"),
            (kind == self.kind, "kind"),
            (round == self.round, "round"),
            (sender in self.senders, "sender"),
            (sender not in self.seen, "sender"),
            ((samples == 0) == (sender == SERVER), "decode"),
        ]
        for good, error in checks:
            if not good:
                raise Refused(error)
        values = read_payload(self.fields, payload)
        self.seen.add(sender)
        return sender, samples, values


# Section 9: the digest.


def digest_text(values: dict[str, int | float | bool | str | bytes]) -> str:
    def written(value: int | float | bool | str | bytes) -> str:
        if isinstance(value, float):
            return struct.pack(">d", value).hex()
        if isinstance(value, bytes):
            return value.hex()
        return value if isinstance(value, str) else str(int(value))

    return "".join(f"{key}={written(values[key])}\n" for key in sorted(values))


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]


@dataclass(frozen=True)
class Known:
    """What both ends of any method know before the first round (section 2)."""

    layers: Table
    classes: int
    seed: int
    initial: Sequence[float]

    def text(self) -> str:
        raise NotImplementedError

    def fields(self, kind: int) -> tuple[Field, ...]:
        raise NotImplementedError

    @property
    def digest(self) -> bytes:
        return digest_of(self.text())

    def receiver(self, kind: int, round: int, senders: Collection[int]) -> Receiver:
        return Receiver(kind, self.fields(kind), round, self.digest, senders)

    def frame(self, kind: int, round: int, sender: int, samples: int, values: Sequence) -> bytes:
        return write_frame(kind, round, sender, samples, self.digest, write_payload(self.fields(kind), values))


@dataclass(frozen=True)
class Run(Known):
    """A run of `pfedlms`."""

    thresholds: int = 7
    ratio: float = 0.1
    strength: float = 0.05
    smoothing: float = 0.1
    refresh: int = 1
    spacing: str = "quantile"
    layerwise: bool = True

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


def common_lines(
    method: str, layers: Table, classes: int, seed: int, initial: Sequence[float]
) -> dict[str, int | float | bool | str | bytes]:
    return {
        "classes": classes,
        "initial": hashlib.sha256(struct.pack(f"<{len(initial)}f", *initial)).digest(),
        "layers": ",".join(f"{offset}:{size}" for offset, size in layers),
        "method": method,
        "protocol": 1,
        "seed": seed,
    }


# Section 10: a run, message by message.


class Client:
    """One client in one round; `model` is θ_k."""

    def __init__(self, run: Run, id: int, samples: int, round: int, model: Sequence[float]) -> None:
        self.run, self.id, self.samples, self.round = run, id, samples, round
        self.sketch = sketch(model, run.table, run.sizes, run.seed, round // run.refresh)

    def send_statistics(self) -> bytes:
        means, variances = zip(*map(statistics, self.sketch), strict=True)
        return self._send(0, [means, variances])

    def hear_thresholds(self, reply: bytes) -> None:
        _, _, (means, deviations) = self.run.receiver(1, self.round, [SERVER]).accept(reply)
        self.thresholds = [
            thresholds_of(mean, deviation, self.run.thresholds, self.run.spacing)
            for mean, deviation in zip(means, deviations, strict=True)
        ]

    def send_symbols(self) -> bytes:
        self.symbols = [q for y, tau in zip(self.sketch, self.thresholds, strict=True) for q in symbols_of(y, tau)]
        return self._send(2, [self.symbols])

    def hear_consensus(self, reply: bytes) -> None:
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
            pooled.append(pool(samples, means, variances))
        return self._reply(1, list(zip(*pooled, strict=True)))

    def count_votes(self, frames: Iterable[bytes]) -> bytes:
        accepted = accept(self.run.receiver(2, self.round, self.clients), frames, self.refused)
        ballots = [values[0] for _, _, values in accepted]
        return self._reply(3, [vote([samples for _, samples, _ in accepted], ballots, self.run.thresholds)])

    def _reply(self, kind: int, values: Sequence) -> bytes:
        return self.run.frame(kind, self.round, SERVER, 0, values)


def accept(receiver: Receiver, frames: Iterable[bytes], refused: list[str]) -> list[tuple[int, int, list]]:
    """Good frames in ascending order of ids; the errors of others are added to `refused`."""
    accepted = []
    for data in frames:
        try:
            accepted.append(receiver.accept(data))
        except Refused as error:
            refused.append(error.error)
    return sorted(accepted, key=lambda message: message[0])


# Section 11: FedAvg and STC.


def average(samples: Sequence[int], models: Sequence[Sequence[float]]) -> list[float]:
    total, result = sum(samples), []
    for values in zip(*models, strict=True):
        weighted = 0.0
        for n, x in zip(samples, values, strict=True):
            weighted = weighted + n * x
        result.append(f32(weighted / total))
    return result


def stc_fields(count: int, dim: int) -> list[Field]:
    return [Floats(1, minimum=0.0), Signs(count), Positions(count, dim)]


def ternary(x: Sequence[float], count: int) -> list:
    """Magnitude, signs and positions: the values of `stc_fields`."""
    positions = sorted(sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:count])
    magnitude = f32(math.fsum(abs(x[i]) for i in positions) / count)
    return [[magnitude], [1.0 if x[i] >= 0 else -1.0 for i in positions], positions]


def added(x: Sequence[float], factor: float, values: Sequence) -> list[float]:
    """x + factor · STC, factor 1 or −1."""
    (magnitude,), signs, positions = values
    result = list(x)
    for sign, i in zip(signs, positions, strict=True):
        result[i] = f32(result[i] + factor * sign * magnitude)
    return result


def pooled(samples: Sequence[int], messages: Sequence[Sequence], residual: Sequence[float]) -> list[float]:
    """The server's x."""
    sums = [0.0] * len(residual)
    for n, ((magnitude,), signs, positions) in zip(samples, messages, strict=True):
        for sign, i in zip(signs, positions, strict=True):
            sums[i] = sums[i] + n * (sign * magnitude)
    return [f32(s / sum(samples) + e) for s, e in zip(sums, residual, strict=True)]


# Section 11.1: a run of sketchvote.

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
