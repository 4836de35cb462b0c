"""Columns of tables find their values."""

from __future__ import annotations

import pfedlms
from pfedlms.report.results import COLUMNS


def test_every_column_finds_its_value_in_the_summary_of_some_run() -> None:
    """A column whose place is misspelt would vanish without a word."""
    short = {"rounds": 2, "clients": 4, "hidden": 8, "validation": 0.2, "progress": False}
    images = pfedlms.run("digits", method="fedavg", newcomers=0.25, **short)
    words = pfedlms.data.texts({"a": "abab" * 30, "b": "baab" * 30}, window=8)
    text = pfedlms.run(words, "gru", method="fedavg", rounds=2, progress=False)
    for column in COLUMNS:
        if column.place:
            assert any(column.value(run.summary) is not None for run in (images, text)), column.key
