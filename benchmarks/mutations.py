"""Bytes that were changed on their way. It imports nothing of the package: an app of the benchmark takes it along."""

from __future__ import annotations

import random
import zlib


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut off, repeated or inserted."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out)) if out else 0
        what = draw.randrange(5)
        if what == 0 and out:
            out[at] ^= draw.randint(1, 255)
        elif what == 1 and out:
            out[at : at + 8] = draw.choice([b"\xff" * 8, bytes(8), draw.randbytes(8)])
        elif what == 2:
            del out[at:]
        elif what == 3:
            out[at:at] = draw.randbytes(draw.randint(1, 40))
        else:
            out[at:at] = out[at : at + draw.randint(1, 64)]
    return bytes(out) if out != data else mutated(data, draw)


def with_checksum(data: bytes) -> bytes:
    """A reply whose length and checksum fit again."""
    if len(data) < 44:
        return data
    head = data[:32] + (len(data) - 44).to_bytes(8, "little")
    return head + zlib.crc32(data[44:], zlib.crc32(head)).to_bytes(4, "little") + data[44:]
