"""Files from the disk, whole or refused by name, and the packages of the extra `data` that read them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedlms.errors import DataError, reason


def contents(path: Path) -> bytes:
    """The bytes of a file, unpacked if its name ends in .gz, which checks their length and checksum."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); allow it, or fetch the file again") from error


@contextmanager
def extra(what: str) -> Iterator[None]:
    """Around an import of a package of the extra `data`: turns ImportError into a DataError with the remedy."""
    try:
        yield
    except ImportError as error:
        remedy = "install what is missing with: pip install 'pfedlms[data]'"
        raise DataError(f"data: {what} need {error.name or error} ({error}); {remedy}") from error


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """A Parquet file, opened; errors of Arrow become a DataError that names it."""
    with extra("Parquet files"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise DataError(f"{path}: not a whole Parquet file ({reason(error)}); write or fetch the file again") from error
