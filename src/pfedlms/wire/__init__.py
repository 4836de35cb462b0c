"""Symbols ↔ bits ↔ checked messages."""

from pfedlms.wire.codec import Buffer, pack, packed_size, unpack
from pfedlms.wire.fields import Field, Floats, Mask, MaskedRows, Message, Scalar, Signs, Symbols
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, Received, agreement_digest, frame

__all__ = [
    "HEADER_BYTES",
    "SERVER",
    "Buffer",
    "Field",
    "Floats",
    "Intake",
    "Mask",
    "MaskedRows",
    "Message",
    "Received",
    "Scalar",
    "Signs",
    "Symbols",
    "agreement_digest",
    "frame",
    "pack",
    "packed_size",
    "unpack",
]
