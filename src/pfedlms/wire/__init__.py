"""Symbols ↔ bits ↔ checked messages; see `codec`, `fields` and `frames`."""

from pfedlms.wire.codec import Mask, Signs, Symbols, pack, packed_size, unpack
from pfedlms.wire.fields import Floats, MaskedRows, Message, Scalar

__all__ = ["Floats", "Mask", "MaskedRows", "Message", "Scalar", "Signs", "Symbols", "pack", "packed_size", "unpack"]
