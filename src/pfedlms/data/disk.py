"""Reading files: a damaged one is named in a DataError, and so is a missing package of the extra `data`."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedlms.errors import DataError, reason


def read_contents(path: Path) -> bytes:
    """The bytes of a file. One that ends in .gz is unpacked, which checks length and checksum."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); allow it, or fetch the file again") from error


@contextmanager
def explain_missing_package(what: str) -> Iterator[None]:
    """Around an import for `what`: turns ImportError into a DataError that names the extra `data`."""
    try:
        yield
    except ImportError as error:
        remedy = "install what is missing with: pip install 'pfedlms[data]'"
        raise DataError(f"data: {what} need {error.name or error} ({error}); {remedy}") from error


@contextmanager
def open_parquet(path: Path, expected: str = "a whole Parquet file") -> Iterator[Any]:
    """Open a Parquet file; what goes wrong inside becomes a DataError that names the file."""
    with explain_missing_package("Parquet files"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}), expected {expected}; fetch it again") from error
