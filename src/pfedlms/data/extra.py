"""Packages of the extra `data`, which are imported where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pfedlms.errors import DataError


@contextmanager
def extra(what: str) -> Iterator[None]:
    """Around an import: turns ImportError into a DataError with the command that installs the package."""
    try:
        yield
    except ImportError as error:
        remedy = "install what is missing with: pip install 'pfedlms[data]'"
        raise DataError(f"data: {what} need {error.name or error} ({error}); {remedy}") from error
