"""Symbols ↔ bits ↔ checked messages; see `codec`, `golomb`, `fields` and `frames`."""

from pfedlms.wire.codec import Mask, Signs, Symbols, pack, packed_size, unpack
from pfedlms.wire.fields import Floats, MaskedRows, Message, Scalar
from pfedlms.wire.golomb import Positions

__all__ = [
    "Floats",
    "Mask",
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
