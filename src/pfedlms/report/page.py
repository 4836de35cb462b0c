"""One HTML page of runs, which loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pfedlms.report.runs import RunLike, Section


def write_page(
    sections: Sequence[Section],
    file: str | Path,
    figures: str | Path | None = None,
    *,
    layers_of: Callable[[RunLike], tuple[list[Any], str]] | None = None,
    left_out: Sequence[str] = (),
) -> list[Path]:
    """Write the page of these sections to `file`, and with `figures` every figure as SVG and its data as CSV to that
    folder. Returns the files written."""
    raise NotImplementedError
