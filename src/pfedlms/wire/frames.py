"""Frames: a payload behind a fixed header of 40 bytes, and the checks that a receiver makes before it uses one.

    offset size
    0      4     magic "PFLM"
    4      1     protocol version
    5      1     kind: 2 · exchange for client → server, 2 · exchange + 1 for server → client
    6      2     reserved, zero
    8      4     round
    12     4     sender: the client's id, 0xFFFFFFFF for the server
    16     4     samples: the client's N_k, zero from the server
    20     8     payload length in bytes
    28     8     digest of what both ends must agree on
    36     4     CRC-32 (zlib's) of bytes 0–35 and the payload

Numbers are unsigned, little endian. The checksum finds damage by accident; it does not authenticate the sender.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedlms.backend import run_kernel
from pfedlms.errors import (
    ChecksumError,
    DecodeError,
    DigestError,
    KindError,
    MagicError,
    OversizedError,
    RoundError,
    SenderError,
    TruncatedError,
    VersionError,
    WireError,
)
from pfedlms.wire.codec import Buffer
from pfedlms.wire.fields import Array, Message, Values

MAGIC = b"PFLM"
VERSION = 1
SERVER = 0xFFFFFFFF
_DIGEST_BYTES = 8
_HEADER = struct.Struct("<4sBBHIIIQ8s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_SENDER, _SAMPLES, _CHECKSUM = slice(12, 16), slice(16, 20), slice(36, 40)  # bytes of a header


def agreement_digest(agreement: Mapping[str, int | float | bool | str | bytes]) -> bytes:
    """First 8 bytes of SHA-256 over the lines `key=value\\n`, keys in ASCII order.

    Integers and booleans (1, 0) are written in decimal, floats as the 16 hex digits of their big-endian IEEE 754
    double, text as it is, bytes in hex.
    """
    lines = [f"{key}={_canonical(agreement[key])}\n" for key in sorted(agreement)]
    return hashlib.sha256("".join(lines).encode()).digest()[:_DIGEST_BYTES]


def _canonical(value: int | float | bool | str | bytes) -> str:
    if isinstance(value, float | np.floating):
        return struct.pack(">d", value).hex()
    if isinstance(value, bytes):
        return value.hex()
    return str(int(value)) if isinstance(value, int | np.integer | np.bool_) else value


def frame(
    message: Message,
    values: Values,
    *,
    round: int,
    sender: int,
    samples: int,
    digest: bytes,
    out: bytearray | memoryview | None = None,
) -> bytes | memoryview:
    """Encode `values` as one frame: as bytes, or as the beginning of `out`, of which a view is returned."""
    end = HEADER_BYTES + message.size(values)
    data = memoryview(bytearray(end) if out is None else out).cast("B")[:end]
    if len(data) < end:
        raise ValueError(f"out: got {len(data)} bytes, expected {end} or more")
    message.write(values, data[HEADER_BYTES:])
    data[: _HEADER.size] = _header(message.kind, round, sender, samples, end - HEADER_BYTES, digest)
    _CRC.pack_into(data, _HEADER.size, _checksum(data))
    return bytes(data) if out is None else data


def frame_rows(
    message: Message,
    values: Values,
    *,
    round: int,
    senders: Sequence[int],
    samples: Sequence[int],
    digest: bytes,
    out: Array,
) -> None:
    """Encode every row of `values: [senders, …]` as a frame, a row of `out`, uint8 `[senders, HEADER_BYTES +
    message.rows_size(values)]`."""
    size = out.shape[1] - HEADER_BYTES
    message.write_rows(values, out[:, HEADER_BYTES:])
    out[:, : _HEADER.size] = _headers(message, round, size, digest, senders, samples)
    out[:, _CHECKSUM] = np.array(_checksums(out), dtype="<u4")[:, None].view(np.uint8)


def frame_on_gpu(
    message: Message,
    values: Mapping[str, Tensor],
    *,
    round: int,
    senders: Sequence[int],
    samples: Sequence[int],
    digest: bytes,
) -> Tensor:
    """Encode as `frame_rows` does, in the memory of the GPU that holds `values`: int32 `[senders, words]`; for a
    message of `only_floats`."""
    from pfedlms.wire import gpu

    headers = np.zeros((len(senders), HEADER_BYTES), np.uint8)
    headers[:, : _HEADER.size] = _headers(message, round, message.max_bytes, digest, senders, samples)
    return gpu.framed(headers, [values[part.name] for part in message.fields])


def _headers(
    message: Message, round: int, length: int, digest: bytes, senders: Sequence[int], samples: Sequence[int]
) -> Array:
    """The headers of frames with payloads of `length` bytes, without their checksums: uint8 `[senders, 36]`."""
    clients = zip(senders, samples, strict=True)
    headers = [_header(message.kind, round, sender, weight, length, digest) for sender, weight in clients]
    return np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER.size)


def _header(kind: int, round: int, sender: int, samples: int, length: int, digest: bytes) -> bytes:
    """A header without its checksum."""
    return _HEADER.pack(MAGIC, VERSION, kind, 0, round, sender, samples, length, digest)


def _numbers(frames: Array, place: slice) -> list[int]:
    """The number at the same 4 bytes of every frame."""
    numbers: list[int] = np.ascontiguousarray(frames[:, place]).view("<u4")[:, 0].tolist()
    return numbers


def _checksums(frames: Array) -> list[int]:
    """The checksum of every row, whose header must be complete but for it."""
    checksums = [0] * len(frames)

    def fill(first: int, last: int) -> None:
        for row in range(first, last):
            checksums[row] = _checksum(frames[row].data)

    run_kernel(fill, len(frames), frames.shape[1] // 4)  # zlib lets other threads run
    return checksums


def _checksum(data: memoryview) -> int:
    return zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: _HEADER.size]))


class Received(NamedTuple):
    """The content of a frame that passed every check."""

    sender: int
    samples: int
    values: dict[str, Array]
    payload_bytes: int


class ReceivedRows(NamedTuple):
    """The content of several clients' frames that passed every check; values have a row for each client."""

    senders: list[int]
    samples: list[int]
    values: dict[str, Any]


class Intake:
    """Checks the frames that one end receives in one exchange. `senders` are the clients of the round, or the server;
    one frame is accepted from each. Both ends must have the same `digest`."""

    def __init__(self, message: Message, digest: bytes, round: int, senders: Collection[int]) -> None:
        self._message, self._digest, self._round, self._senders = message, digest, round, senders
        self._seen: set[int] = set()

    def accept(self, data: Buffer) -> Received:
        """Parse and check one frame; raise the matching WireError if it is not valid. Every length is compared with the
        bytes received and with the limit before memory is allocated."""
        sender, samples, payload = self._check_frame(memoryview(data).cast("B").toreadonly())
        values = self._message.read(payload)
        self._seen.add(sender)
        return Received(sender, samples, values, len(payload))

    def accept_rows(self, frames: Array) -> ReceivedRows | None:
        """Accept every row of `frames`, uint8 `[clients, size]`. If one of them is not valid, return None and accept
        none: call `accept` for each to learn what is wrong. Values may be views of `frames`."""
        senders, samples = self._known_senders(frames, frames.shape[1])
        if not senders or _numbers(frames, _CHECKSUM) != _checksums(frames):
            return None
        try:
            values = self._message.read_rows(frames[:, HEADER_BYTES:])
        except WireError:
            return None
        self._seen.update(senders)
        return ReceivedRows(senders, samples, values)

    def accept_on_gpu(self, frames: Tensor) -> ReceivedRows | None:
        """Accept frames in a GPU's memory, as `frame_on_gpu` returns them; values are views of them."""
        from pfedlms.wire import gpu

        headers, fine = gpu.opened(frames)
        senders, samples = self._known_senders(headers, frames.shape[1] * 4)
        if not senders or not fine or frames.shape[1] * 4 != HEADER_BYTES + self._message.max_bytes:
            return None
        fields, numbers = self._message.floats, frames[:, gpu.HEADER :].view(torch.float32)
        parts = torch.split(numbers, [part.count for part in fields], dim=1)
        self._seen.update(senders)
        return ReceivedRows(senders, samples, dict(zip([part.name for part in fields], parts, strict=True)))

    def _known_senders(self, headers: Array, size: int) -> tuple[list[int], list[int]]:
        """Senders and samples of frames of `size` bytes, from rows that begin with their headers. Two empty lists if
        one header is not valid; its checksum is not looked at."""
        length = size - HEADER_BYTES
        if not 0 <= length <= self._message.max_bytes:
            return [], []
        senders, samples = _numbers(headers, _SENDER), _numbers(headers, _SAMPLES)
        expected = _headers(self._message, self._round, length, self._digest, senders, samples)
        if not np.array_equal(headers[:, : _HEADER.size], expected):
            return [], []
        distinct = set(senders)
        expected_senders = all(sender in self._senders for sender in distinct) and not distinct & self._seen
        once = len(distinct) == len(senders)
        valid = expected_senders and once and SERVER not in distinct and 0 not in samples
        return (senders, samples) if valid else ([], [])

    def _check_frame(self, view: memoryview) -> tuple[int, int, memoryview]:
        """Sender, samples and payload of a frame; raise the matching WireError if its header is not valid."""
        if len(view) < HEADER_BYTES:
            raise TruncatedError(f"frame: got {len(view)} bytes, expected a header of {HEADER_BYTES}")
        magic, version, kind, reserved, round, sender, samples, length, digest = _HEADER.unpack_from(view)
        if magic != MAGIC:
            raise MagicError(f"magic: got {bytes(magic)!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise VersionError(f"version: got {version}, expected {VERSION}; update the older end")
        payload = view[HEADER_BYTES:]
        if length > self._message.max_bytes:
            raise OversizedError(f"payload: got {length} bytes, expected at most {self._message.max_bytes}")
        if len(payload) > length:
            raise OversizedError(f"payload: got {len(payload)} bytes, expected {length}")
        if len(payload) < length:
            raise TruncatedError(f"payload: got {len(payload)} bytes, expected {length}")
        (checksum,), actual = _CRC.unpack_from(view, _HEADER.size), _checksum(view)
        if checksum != actual:
            raise ChecksumError(
                f"checksum: got {checksum:08x}, expected {actual:08x}; the frame was changed on the way"
            )
        if reserved:
            raise DecodeError(f"reserved: got {reserved}, expected 0")
        if digest != self._digest:
            raise DigestError(
                f"digest: got {digest.hex()}, expected {self._digest.hex()}; "
                "the ends differ in model, method, settings, seed or w⁰"
            )
        if kind != self._message.kind:
            raise KindError(f"kind: got {kind}, expected {self._message.kind}")
        if round != self._round:
            raise RoundError(f"round: got {round}, expected {self._round}")
        if sender not in self._senders:
            raise SenderError(f"sender: got {sender}, which takes no part in this exchange")
        if sender in self._seen:
            raise SenderError(f"sender: got a second message of {sender} in one exchange")
        if (samples == 0) != (sender == SERVER):
            raise DecodeError(
                f"samples: got {samples} from sender {sender}, expected at least 1 from a client and 0 from the server"
            )
        return sender, samples, payload
