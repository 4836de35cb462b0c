"""Section 7 of the page: a payload of each field."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedlms import errors, rng
from pfedlms.wire import Bits, Floats, Mask, MaskedBytes, MaskedRows, Message, Positions, Scalar, Signs, Symbols
from pfedlms.wire.fields import Field
from pfedlms.wire.frames import HEADER_BYTES, frame
from pfedlms.wire.golomb import Count, Places
from vector_makers.notation import bits32, floats, sign_text, symbols


def payload(values: dict[str, np.ndarray], *parts: Field) -> str:
    return frame(Message(0, parts), values, round=0, sender=0, samples=1, digest=bytes(8))[HEADER_BYTES:].hex()


# b = 0, 2, 0 and 6; all places, a long run of ones, one position of two, and the last of many.
PLACES = ((9, list(range(9))), (20, [1, 2, 19]), (2, [1]), (1000, [0, 63, 64, 129, 500, 501, 502, 503, 504, 999]))


def entry(field: str, given: dict[str, np.ndarray], /, *parts: Field, **about: Any) -> dict[str, Any]:
    return {"field": field, **about, "payload": payload(given, *parts)}


def fields() -> list[dict[str, Any]]:
    mask = np.array([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], dtype=bool)
    bits = mask.astype(int).tolist()
    rows = floats(20, 5).reshape(10, 2) * mask[:, None]
    chosen, signs = symbols(12, 3, 6), rng.signs(rng.stream(2024, "vectors", 6), 11)
    vector, scalar = floats(3, 7), np.float32([2.5])
    masked = (Mask("mask", 10), MaskedRows("rows", "mask", 10, 2))
    entries = [
        entry("symbols", {"x": chosen}, Symbols("x", (7, 5), 3), segments=[7, 5], levels=3, symbols=chosen.tolist()),
        entry("signs", {"x": signs}, Signs("x", 11), signs=sign_text(signs)),
        entry("floats", {"x": vector}, Floats("x", 3), values=bits32(vector)),
        entry("scalar", {"x": scalar}, Scalar("x"), values=bits32(scalar)),
        entry("mask", {"x": mask}, Mask("x", 10), mask=bits),
        entry("masked rows", {"mask": mask, "rows": rows}, *masked, mask=bits, rows=list(map(bits32, rows))),
    ]
    for places, own in PLACES:
        field = Positions("x", len(own), places)
        entries.append(entry("positions", {"x": np.array(own)}, field, places=places, positions=own))
    for places, own in (*PLACES, (7, [])):
        is_chosen = np.isin(np.arange(places), own)
        entries.append(entry("places", {"x": is_chosen}, Places("x", places), places=places, positions=own))
    entries.append(entry("count", {"x": np.array([16909060])}, Count("x"), count=16909060))
    packed = np.packbits(signs > 0, bitorder="little")
    entries.append(entry("bits", {"x": packed}, Bits("x", 11), signs=sign_text(signs)))
    for sent, content in ((1, np.uint8([0, 1, 128, 255])), (0, np.uint8([9, 9, 9, 9]))):
        values, received = {"mask": np.array([bool(sent)]), "x": content}, (content * sent).tobytes().hex()
        parts = Mask("mask", 1), MaskedBytes("x", "mask", 4)
        entries.append(entry("masked bytes", values, *parts, mask=[sent], bytes=received))
    return entries


# What is wrong, the field, its count or places, the payload, and the error.
WRONG = (
    ("a bit after the last sign", "signs", 11, "ff0f", "decode"),
    ("a bit after the last position", "positions", [3, 20], "c213", "decode"),
    ("a position beyond the last place", "positions", [3, 20], "fe03", "decode"),
    ("positions that do not end", "positions", [3, 20], "c2", "truncated"),
    ("more places than there are", "places", 20, "15000000", "decode"),
    ("a place beyond the last", "places", 20, "03000000fe03", "decode"),
    ("places that do not end", "places", 20, "03000000c2", "truncated"),
    ("something behind no places", "places", 20, "0000000000", "oversized"),
)


def refused_fields() -> list[dict[str, Any]]:
    """Payloads of one field that must be refused."""
    field_types = {"signs": lambda own: Signs("x", own), "positions": lambda own: Positions("x", *own)}
    field_types["places"] = lambda own: Places("x", own)
    entries = []
    for what, kind, own, data, error in WRONG:
        try:
            Message(0, (field_types[kind](own),)).read(memoryview(bytes.fromhex(data)))
        except errors.WireError as found:
            reason = type(found).__name__.lower()
        else:
            reason = "accepted"
        assert reason == f"{error}error", f"{what}: {reason}"
        entries.append({"what": what, "field": kind, "of": own, "payload": data, "error": error})
    return entries
