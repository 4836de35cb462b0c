"""Symbols ↔ bits ↔ checked messages; see `codec`, `golomb`, `fields` and `frames`."""

from pfedlms.wire.codec import Bits, Mask, Signs, Symbols, pack, packed_size, unpack
from pfedlms.wire.fields import Floats, MaskedBytes, MaskedRows, Message, Scalar
from pfedlms.wire.golomb import Positions

__all__ = [
    "Bits",
    "Floats",
    "Mask",
    "MaskedBytes",
    "MaskedRows",
    "Message",
    "Positions",
    "Scalar",
    "Signs",
    "Symbols",
    "pack",
    "packed_size",
    "unpack",
]
