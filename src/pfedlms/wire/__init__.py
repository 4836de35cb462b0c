"""Symbols ↔ bits ↔ checked messages; see `codec`, `fields` and `frames`."""

from pfedlms.wire.codec import Bits, Mask, Signs, Symbols, pack, packed_size, unpack
from pfedlms.wire.fields import Floats, MaskedBytes, MaskedRows, Message, Scalar

__all__ = [
    "Bits",
    "Floats",
    "Mask",
    "MaskedBytes",
    "MaskedRows",
    "Message",
    "Scalar",
    "Signs",
    "Symbols",
    "pack",
    "packed_size",
    "unpack",
]
