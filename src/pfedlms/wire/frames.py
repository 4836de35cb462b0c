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
    out[:, _HEADER.size : HEADER_BYTES] = np.array(_checksums(out), dtype="<u4")[:, None].view(np.uint8)


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

    def accept(self, data: Buffer, into: Values | None = None) -> Received:
        """Parse and check one frame; raise the matching WireError if it is not valid. Every length is compared with the
        bytes received and with the limit before memory is allocated. Values are copied into the arrays of `into` (a row
        of `Message.empty_values`), or into new ones."""
        view = memoryview(data).cast("B").toreadonly()
        sender, samples = self._check_header(view[:HEADER_BYTES], len(view), _checksum(view))
        payload = view[HEADER_BYTES:]
        values = self._message.read(payload)
        kept = {name: np.empty_like(value) for name, value in values.items()} if into is None else into
        for name, value in values.items():
            kept[name][...] = value
        self._seen.add(sender)
        return Received(sender, samples, dict(kept))

    def accept_rows(self, frames: Array) -> ReceivedRows | None:
        """Accept every row of `frames`, uint8 `[clients, size]`. If one of them is not valid, return None and accept
        none: call `accept` for each to learn what is wrong. Values may be views of `frames`."""
        try:
            senders, samples = self._check_headers(frames[:, :HEADER_BYTES], frames.shape[1], _checksums(frames))
            values = self._message.read_rows(frames[:, HEADER_BYTES:])
        except WireError:
            return None
        self._seen.update(senders)
        return ReceivedRows(senders, samples, values)

    def accept_on_gpu(self, frames: Tensor) -> ReceivedRows | None:
        """Accept frames in a GPU's memory, as `frame_on_gpu` returns them; values are views of them."""
        from pfedlms.wire import gpu

        headers, fine = gpu.opened(frames)
        stored = headers[:, _HEADER.size :].view("<u4")[:, 0].tolist()  # all right, if they are fine
        try:
            senders, samples = self._check_headers(headers, frames.shape[1] * 4, stored)
        except WireError:
            return None
        if not fine or frames.shape[1] * 4 != HEADER_BYTES + self._message.max_bytes:
            return None
        fields, numbers = self._message.floats, frames[:, gpu.HEADER :].view(torch.float32)
        parts = torch.split(numbers, [part.count for part in fields], dim=1)
        self._seen.update(senders)
        return ReceivedRows(senders, samples, dict(zip([part.name for part in fields], parts, strict=True)))

    def _check_headers(self, headers: Array, size: int, checksums: Sequence[int]) -> tuple[list[int], list[int]]:
        """Senders and samples of clients' frames of `size` bytes; raise a WireError if one header is not valid."""
        checked = [self._check_header(row.data, size, own) for row, own in zip(headers, checksums, strict=True)]
        senders, samples = [sender for sender, _ in checked], [weight for _, weight in checked]
        if len(set(senders)) < len(senders) or SERVER in senders:
            raise SenderError("senders: got one twice, or the server")
        return senders, samples

    def _check_header(self, header: memoryview, size: int, checksum: int) -> tuple[int, int]:
        """Sender and samples of a frame of `size` bytes, whose bytes have this `checksum`; raise the matching WireError
        if its header is not valid."""
        if size < HEADER_BYTES:
            raise TruncatedError(f"frame: got {size} bytes, expected a header of {HEADER_BYTES}")
        magic, version, kind, reserved, round, sender, samples, length, digest = _HEADER.unpack_from(header)
        (stored,), payload = _CRC.unpack_from(header, _HEADER.size), size - HEADER_BYTES
        if magic != MAGIC:
            raise MagicError(f"magic: got {bytes(magic)!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise VersionError(f"version: got {version}, expected {VERSION}; update the older end")
        if length > self._message.max_bytes:
            raise OversizedError(f"payload: got {length} bytes, expected at most {self._message.max_bytes}")
        if payload > length:
            raise OversizedError(f"payload: got {payload} bytes, expected {length}")
        if payload < length:
            raise TruncatedError(f"payload: got {payload} bytes, expected {length}")
        if stored != checksum:
            raise ChecksumError(
                f"checksum: got {stored:08x}, expected {checksum:08x}; the frame was changed on the way"
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
        return sender, samples
