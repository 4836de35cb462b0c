"""Frames of all clients, written together."""

from __future__ import annotations

import numpy as np

from pfedlms.wire import Floats, Message
from pfedlms.wire.frames import HEADER_BYTES, Intake, frame, frame_rows

DIGEST = bytes(range(1, 9))


def test_rows_are_framed_as_one_by_one() -> None:
    message = Message(0, (Floats("model", 1000), Floats("statistics", 77)))
    draw = np.random.default_rng(0)
    rows = {part.name: draw.standard_normal((3, part.count), dtype=np.float32) for part in message.fields}
    header = {"round": 2, "digest": DIGEST}
    expected = [
        frame(message, {name: own[row] for name, own in rows.items()}, sender=sender, samples=sender + 1, **header)
        for row, sender in enumerate((1, 4, 9))
    ]
    out = np.empty((3, HEADER_BYTES + message.max_bytes), np.uint8)
    frame_rows(message, rows, senders=[1, 4, 9], samples=[2, 5, 10], out=out, **header)
    assert [own.tobytes() for own in out] == expected
    received = Intake(message, DIGEST, 2, {1, 4, 9}).accept_rows(out)
    assert received is not None
    assert (received.senders, received.samples) == ([1, 4, 9], [2, 5, 10])
    assert all(np.array_equal(received.values[name], own) for name, own in rows.items())
