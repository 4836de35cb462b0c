"""What a peer may send: sizes that follow from the request, checked before anything is parsed."""

from __future__ import annotations

from collections.abc import Sequence

from pfedlms.deploy import envelope
from pfedlms.deploy.envelope import ENVELOPE_BYTES, RECORD_BYTES, Envelope, Why, decode, refusal
from pfedlms.deploy.ground import Ground
from pfedlms.engine.transport import Code, Flag, Split
from pfedlms.errors import OversizedError, WireError
from pfedlms.flower.text import shown
from pfedlms.wire.frames import HEADER_BYTES

_REFUSED_BYTES = ENVELOPE_BYTES + 2 * RECORD_BYTES + envelope.LONGEST_TEXT
_NOT_KNOWN = 0xFFFFFFFF
"""More answers than any run has: a server does not believe it and keeps what it knew."""


def message_bytes(ground: Ground) -> list[int]:
    """Bytes of the largest frame that a client sends, by exchange."""
    return [HEADER_BYTES + each.up.max_bytes for each in ground.terms.method.exchanges]


def largest_reply(request: Envelope, messages: Sequence[int]) -> tuple[int, int]:
    """Bytes and records that a reply to this request may have; `messages` are the bytes of the largest frame of each
    exchange."""
    size, records = ENVELOPE_BYTES + RECORD_BYTES, 1  # ANSWERS_KNOWN
    for each in request.records:
        if each.code == Code.SEND:
            size += RECORD_BYTES + (messages[each.index] if each.index < len(messages) else 0)
            records += 1
        elif each.code == Code.TRAIN:
            counts = len(Split) * bool(each.flags & (Flag.PERSONAL | Flag.SHARED))
            size += RECORD_BYTES + envelope.TRAINED.size + counts * (RECORD_BYTES + envelope.MEASURED.size)
            records += 1 + counts
    return max(size, _REFUSED_BYTES), max(records, 2)


def check_reply(request: Envelope, data: bytes, messages: Sequence[int]) -> None:
    """Raise the WireError that says which limit a reply breaks. Only headers of records are read."""
    size, records = largest_reply(request, messages)
    if len(data) > size:
        raise OversizedError(f"reply: got {len(data)} bytes, expected at most {size}, as follows from the request")
    at, found, heard = ENVELOPE_BYTES, 0, 0
    while at + RECORD_BYTES <= len(data):
        code, *_, length = envelope.RECORD.unpack_from(data, at)
        at += RECORD_BYTES + length
        found, heard = found + 1, heard + (code == Code.ANSWERS_KNOWN)
        if found > records:
            raise OversizedError(f"reply: got more than {records} records, as follows from the request")
        if heard > 1:
            raise OversizedError("reply: got more than one ANSWERS_KNOWN")


def made_harmless(request: bytes, data: bytes, messages: Sequence[int]) -> bytes:
    """A reply as it came, if it keeps the limits; a refusal in its place if not. Text of a refusal is escaped."""
    asked = decode(request)
    try:
        check_reply(asked, data, messages)
    except WireError as error:
        return refusal(asked, Why.BROKEN, str(error), _NOT_KNOWN)
    try:
        said = decode(data)
    except WireError:
        return data  # the server finds the same, and says so
    first = said.records[0] if said.records else None
    if first is None or first.code != Code.REFUSED:
        return data
    text = bytes(first.data).decode(errors="replace")
    if "got magic b'PFLS'" in text:
        text = "its pfedlms does not know signed requests; update pfedlms there and run `pfedlms deploy upgrade FOLDER`"
    why = Why(first.flags) if first.flags in list(Why) else Why.FAILED
    heard = [each.number for each in said.records if each.code == Code.ANSWERS_KNOWN]
    return refusal(said, why, shown(text), *heard[:1])
