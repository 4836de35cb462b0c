"""False replies of a registered node, which the server must not accept. Each is the honest reply with one change.
Nodes in this process send them in `test_left_out`, `test_reports` and `test_limits`, real ones in
`test_flower_attacks`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from fleet import Fleet, Route

from factories import sealed
from pfedlms.deploy import Node
from pfedlms.deploy.envelope import (
    Envelope,
    Kind,
    Reason,
    decode,
    measurement_record,
    read_measurement,
    read_training,
    refusal,
    training_record,
)
from pfedlms.engine.transport import Code, Record, Split
from pfedlms.wire.frames import Intake, frame

LIAR = 2
MOST = 2**32 - 1
FORGED = "\x1b[2Jround 9/9: 3 trained\nround 9/9: P-acc 100.00 %"
Lie = Callable[[Envelope, Node], Any]
"""From the honest reply and its node to the reply that is sent, None for no reply."""


def lying_route(lie: Lie, fleet: Callable[[], Fleet]) -> Route:
    """A route on which the liar's replies are changed."""

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        reply = handle(request)
        return lie(decode(reply), fleet().node(LIAR)) if client == LIAR else reply  # type: ignore[no-any-return]

    return route


def change_records(reply: Envelope, code: Code, change: Callable[[Record], Record]) -> bytes:
    return replace(reply, records=tuple(change(each) if each.code == code else each for each in reply.records)).encode()


def with_fields(**values: Any) -> Lie:
    """A reply with other fields and a valid checksum."""
    return lambda reply, node: replace(reply, **values).encode()


def with_frame(at: int, code: str, value: Any) -> Lie:
    """A reply whose message has another number at some byte and a valid checksum."""

    def change(each: Record) -> Record:
        data = bytearray(each.data)
        struct.pack_into("<" + code, data, at, value)
        return replace(each, data=sealed(bytes(data)))

    return lambda reply, node: change_records(reply, Code.SEND, change)


def _add_records(reply: Envelope, *more: Record) -> bytes:
    return replace(reply, records=(*reply.records, *more)).encode()


def enormous(reply: Envelope, node: Node) -> bytes:
    """A length of 2⁶⁰ bytes."""
    return reply.encode()[:32] + struct.pack("<Q", 1 << 60) + reply.encode()[40:]


def garbage(reply: Envelope, node: Node) -> bytes:
    return bytes(range(256)) * 3


not_a_number = with_frame(-4, "f", float("nan"))
many_claimed = with_frame(16, "I", MOST)

MESSAGES: dict[str, tuple[Lie, str]] = {
    "an enormous message": (with_frame(20, "Q", 1 << 60), "OversizedError"),
    "a message of another round": (with_frame(8, "I", 77), "RoundError"),
    "a message of another client": (with_frame(12, "I", 0), "SenderError"),
    "a message of another run": (with_frame(28, "Q", 1), "DigestError"),
    "a weight above what it holds": (many_claimed, "samples: got 4294967295, expected"),
    "NaN": (not_a_number, "expected a finite number"),
}
"""Lies of which only the message is false, and the reasons for which they are left out."""
REPLIES: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda reply, node: None, "no reply within"),
    "garbage": (garbage, "MagicError"),
    "an enormous envelope": (enormous, "TruncatedError"),
    "too little": (with_fields(records=()), "got something else"),
    "a request": (with_fields(kind=Kind.REQUEST), "got a request"),
    "another run": (with_fields(run=bytes(8)), "DigestError"),
    "another trip": (with_fields(trip=77), "RoundError"),
    "for another client": (with_fields(client=0), "SenderError"),
    "an error of the engine": (
        lambda reply, node: refusal(reply, Reason.FAILED, "the process was killed", 0),
        "refused, failed: the process was killed",
    ),
}


def escapes(reply: Envelope, node: Node) -> bytes:
    """A refusal with terminal escapes and forged lines of a log."""
    return refusal(reply, Reason.FAILED, FORGED, 0)


def two_answers_known(reply: Envelope, node: Node) -> bytes:
    return _add_records(reply, Record(Code.ANSWERS_KNOWN, 0))


def many_records(reply: Envelope, node: Node) -> bytes:
    """No more bytes than allowed, but 7 records, where 6 are allowed."""
    return replace(reply, records=(Record(Code.ANSWERS_KNOWN, 0), *[Record(Code.TRAIN, 9)] * 6)).encode()


def one_record_more(reply: Envelope, node: Node) -> bytes:
    """One more than requested, but as many as allowed: splits that are not measured leave room."""
    return _add_records(reply, Record(Code.TRAIN, 9))


def very_many_records(reply: Envelope, node: Node) -> bytes:
    return _add_records(reply, *[Record(Code.ANSWERS_KNOWN, 0)] * 300_000)


def records_of_flower(reply: Envelope, node: Node) -> Any:
    """As many of Flower's own records as the gate lets through."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict(
        {"pfedlms": ConfigRecord({"bytes": reply.encode()})} | {f"{i}": ConfigRecord() for i in range(20)}
    )


def too_large(reply: Envelope, node: Node) -> bytes:
    return bytes(16 << 20)


def most_samples(reply: Envelope, node: Node) -> bytes:
    """The largest number of test samples that the field can hold, all of them predicted correctly."""
    return change_records(reply, Code.MEASURED, lambda each: measurement_record(Split(each.index), MOST, 0.0, MOST))


def large_loss(reply: Envelope, node: Node) -> bytes:
    return change_records(reply, Code.TRAIN, lambda each: training_record(each.number, read_training(each)[0], 1e308))


def large_test_loss(reply: Envelope, node: Node) -> bytes:
    def change(each: Record) -> Record:
        split, (correct, _, samples) = read_measurement(each, percent=True)
        return measurement_record(split, correct, 1e308, samples)

    return change_records(reply, Code.MEASURED, change)


def large_model(reply: Envelope, node: Node) -> bytes:
    """A model of FedAvg whose entries are all 1e38: each is finite."""
    terms = node._terms
    up = terms.method.exchanges[0].up

    def change(each: Record) -> Record:
        got = Intake(up, terms.digest, each.number, (reply.client,)).accept(each.data)
        values = {"model": np.full_like(got.values["model"], 1e38)}
        data = frame(up, values, round=each.number, sender=reply.client, samples=got.samples, digest=terms.digest)
        return replace(each, data=bytes(data))

    return change_records(reply, Code.SEND, change)
