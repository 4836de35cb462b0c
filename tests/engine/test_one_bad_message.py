"""One valid message with numbers far beyond the others' harms nobody: its sender is left out, and named."""

from __future__ import annotations

import struct
import warnings
from typing import Any

import numpy as np
import pytest

from factories import digits, federation, played
from pfedlms.aggregate import outliers
from pfedlms.methods import METHODS
from pfedlms.wire.frames import Intake, frame

LIAR, LARGEST = 2, float(np.finfo(np.float32).max)
_HEADER = struct.Struct("<4sBBHIIIQ8s")


def float_fields() -> list[tuple[str, int, str]]:
    """Every field of every method's messages that holds numbers of the client's own choosing."""
    found = []
    for name in METHODS:
        for number, exchange in enumerate(federation(name, digits(5)).method.exchanges):
            own = [part for part in exchange.up.fields if part.dtype is np.float32 and type(part).__name__ != "Signs"]
            found += [(name, number, part.name) for part in own]
    return found


FIELDS = float_fields()


def test_every_method_that_sends_floats_is_here() -> None:
    without = {"sketchmean", "pfed1bs", "zsign", "obda", "local"}
    assert {name for name, _, _ in FIELDS} == set(METHODS) - without


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1e9])
@pytest.mark.parametrize(("method", "exchange", "field"), FIELDS)
def test_an_enormous_number_leaves_its_sender_out(method: str, exchange: int, field: str, value: float) -> None:
    def link(data: bytes, sender: int) -> bytes:
        _, _, kind, _, round, _, samples, _, digest = _HEADER.unpack_from(data)
        message = run.method.exchanges[exchange].up
        if sender != LIAR or kind != message.kind:
            return data
        part = next(each for each in message.fields if each.name == field)
        values = Intake(message, digest, round, (sender,)).accept(data).values
        values[field] = np.full_like(values[field], abs(value) if part.minimum >= 0 else value)
        return bytes(frame(message, values, round=round, sender=sender, samples=samples, digest=digest))

    run: Any = federation(method, digits(5), link=link, max_scale=100.0, quorum=0.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            report = run.play_round()
            assert np.isfinite(report.loss)
    state = run.state()
    assert state["params"].isfinite().all()
    assert all(tensor.isfinite().all() for tensor in state["server"].values())
    named = [str(each.message) for each in seen if f"client {LIAR} is left out" in str(each.message)]
    assert len(named) >= 3
    assert all(f"its {field} is more than train.max_scale = 100 times" in text for text in named)
    assert not [
        each for each in seen if "is left out" in str(each.message) and f"client {LIAR} " not in str(each.message)
    ]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "local"])
def test_honest_messages_are_added_up_to_the_same_bits(method: str) -> None:
    states = [played(federation(method, digits(5), max_scale=bound), 4).state() for bound in (0.0, 100.0)]
    assert all((states[0]["server"][name] == value).all() for name, value in states[1]["server"].items())
    assert (states[0]["params"] == states[1]["params"]).all()


def test_outliers_by_hand() -> None:
    """Medians 2 and 20 by column; in 300 columns the largest of a row counts, here 1, 1 and 500."""
    assert outliers(np.float32([[1, 10], [2, 20], [3, 2001]]), 100) == [2]
    assert outliers(np.float32([[1, 10], [2, 20], [3, 2000]]), 100) == []
    wide = np.ones((3, 300), dtype=np.float32)
    wide[2, 7] = -500
    assert outliers(wide, 100) == [2]
    assert outliers(wide, 500) == []
    assert outliers(np.zeros((4, 2), dtype=np.float32), 100) == []
    # Of a column that only one row has anything in, the size is that of all entries, here 1.
    assert outliers(np.float32([[1, 0], [1, 0], [1, 101]]), 100) == [2]
