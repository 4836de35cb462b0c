"""Sections 8 and 9 of the page: frames, what a receiver checks, and the digest."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from plain_client.fields import Field, read_payload, write_payload
from plain_client.numbers import Table
from plain_client.packing import Refused

SERVER = 0xFFFFFFFF
HEADER = struct.Struct("<4sBBHIIIQ8s")


def write_frame(kind: int, round: int, sender: int, samples: int, digest: bytes, payload: bytes) -> bytes:
    header = HEADER.pack(b"PFLM", 1, kind, 0, round, sender, samples, len(payload), digest)
    return header + struct.pack("<I", zlib.crc32(header + payload)) + payload


class Receiver:
    """Accepts one kind of message of one round, one from each sender."""

    def __init__(self, kind: int, fields: Sequence[Field], round: int, digest: bytes, senders: Collection[int]) -> None:
        self.kind, self.fields, self.round, self.digest, self.senders = kind, fields, round, digest, senders
        self.seen: set[int] = set()

    def accept(self, data: bytes) -> tuple[int, int, list]:
        """(sender, samples, values) of a valid frame."""
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
        for passed, error in checks:
            if not passed:
                raise Refused(error)
        values = read_payload(self.fields, payload)
        self.seen.add(sender)
        return sender, samples, values


def accept(receiver: Receiver, frames: Iterable[bytes], refused: list[str]) -> list[tuple[int, int, list]]:
    """Valid frames in ascending order of ids; the errors of the others are added to `refused`."""
    accepted = []
    for data in frames:
        try:
            accepted.append(receiver.accept(data))
        except Refused as error:
            refused.append(error.error)
    return sorted(accepted, key=lambda message: message[0])


def accept_stream(receiver: Receiver, stream: BinaryIO, refused: list[str]) -> tuple[list[tuple[int, int, list]], bool]:
    """Valid frames in the order of arrival, and whether the connection can stay open. It cannot where the start of the
    next frame is unknown."""
    accepted, largest = [], sum(field.largest for field in receiver.fields)
    while header := stream.read(40):
        data, intact = header, False
        if len(header) == 40 and header[:5] == b"PFLM\1":
            (length,) = struct.unpack("<Q", header[20:28])
            if length <= largest:
                data += stream.read(length)
                intact = struct.unpack("<I", data[36:40])[0] == zlib.crc32(data[:36] + data[40:])
        try:
            accepted.append(receiver.accept(data))
        except Refused as error:
            refused.append(error.error)
            if not intact:
                return accepted, False
    return accepted, True


# Section 9: the digest.


def digest_text(values: dict[str, int | float | bool | str | bytes]) -> str:
    def encode(value: int | float | bool | str | bytes) -> str:
        if isinstance(value, float):
            return struct.pack(">d", value).hex()
        if isinstance(value, bytes):
            return value.hex()
        return value if isinstance(value, str) else str(int(value))

    return "".join(f"{key}={encode(values[key])}\n" for key in sorted(values))


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]


@dataclass(frozen=True)
class Agreement:
    """What server and clients of any method agree on before the first round (section 2)."""

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


def zsign_lines(
    participants: int, learning_rate: float, schedule: str, warmup: int, rounds: int, decay: float, decay_every: int
) -> dict[str, int | float | bool | str | bytes]:
    """The lines that `zsign` adds to the text; of the schedule only the settings that its shape uses."""
    lines = {"clients": participants, "learning_rate": learning_rate}
    if schedule != "constant" or warmup:
        lines |= {"shape": schedule, "warmup": warmup, "rounds": rounds if schedule == "cosine" else 0}
        lines |= (
            {"decay": decay, "decay_every": decay_every} if schedule == "step" else {"decay": 1.0, "decay_every": 1}
        )
    return {f"agreement.{name}": value for name, value in lines.items()}
