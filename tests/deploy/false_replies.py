"""Replies that a registered node must not get through. Each is made from the honest reply, so that all but one thing in
it is valid. Nodes in this process tell these lies in `test_reports`, real ones in `test_flower_attacks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import Envelope, Why, measured, read_measured, read_trained, refusal, trained
from pfedlms.engine.transport import Code, Record, Split
from pfedlms.wire.frames import Intake, frame

MOST = 2**32 - 1
FORGED = "\x1b[2Jround 9/9: 3 trained\nround 9/9: P-acc 100.00 %"
Lie = Callable[[Envelope, Node], Any]


def escapes(said: Envelope, node: Node) -> bytes:
    """A refusal with escapes and lines of a log."""
    return refusal(said, Why.FAILED, FORGED, 0)


def two_answers_known(said: Envelope, node: Node) -> bytes:
    return _with(said, Record(Code.ANSWERS_KNOWN, 0))


def many_records(said: Envelope, node: Node) -> bytes:
    """No more bytes than allowed, but 100 records."""
    return replace(said, records=(Record(Code.ANSWERS_KNOWN, 0), *[Record(Code.TRAIN, 9)] * 99)).encode()


def very_many_records(said: Envelope, node: Node) -> bytes:
    return _with(said, *[Record(Code.ANSWERS_KNOWN, 0)] * 300_000)


def records_of_flower(said: Envelope, node: Node) -> Any:
    """As many of Flower's own records as the gate lets through."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({"pfedlms": ConfigRecord({"bytes": said.encode()})} | {f"{i}": ConfigRecord() for i in range(20)})


def too_large(said: Envelope, node: Node) -> bytes:
    return bytes(16 << 20)


def most_samples(said: Envelope, node: Node) -> bytes:
    """As many test samples as the field can name, all of them predicted correctly."""
    return changed(said, Code.MEASURED, lambda each: measured(Split(each.index), MOST, 0.0, MOST))


def large_loss(said: Envelope, node: Node) -> bytes:
    return changed(said, Code.TRAIN, lambda each: trained(each.number, read_trained(each)[0], 1e308))


def large_test_loss(said: Envelope, node: Node) -> bytes:
    def change(each: Record) -> Record:
        split, (correct, _, samples) = read_measured(each, percent=True)
        return measured(split, correct, 1e308, samples)

    return changed(said, Code.MEASURED, change)


def large_model(said: Envelope, node: Node) -> bytes:
    """A model of FedAvg whose entries are all 1e38: each is finite."""
    terms = node._terms
    up = terms.method.exchanges[0].up

    def change(each: Record) -> Record:
        got = Intake(up, terms.digest, each.number, (said.client,)).accept(each.data)
        values = {"model": np.full_like(got.values["model"], 1e38)}
        data = frame(up, values, round=each.number, sender=said.client, samples=got.samples, digest=terms.digest)
        return replace(each, data=bytes(data))

    return changed(said, Code.SEND, change)


def _with(said: Envelope, *more: Record) -> bytes:
    return replace(said, records=(*said.records, *more)).encode()


def changed(said: Envelope, code: Code, change: Callable[[Record], Record]) -> bytes:
    return replace(said, records=tuple(change(each) if each.code == code else each for each in said.records)).encode()
