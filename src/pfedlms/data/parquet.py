"""Images in Parquet files as data hubs lay them out: `train-00000-of-00002.parquet`, …, one image file per row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.data.formats import Format, Part, parquet_file
from pfedlms.data.images import Shape, decode
from pfedlms.errors import DataError

_IMAGES, _LABELS = ("img", "image"), ("label", "fine_label")
"""What the columns may be called. CIFAR-100 has `coarse_label`, too."""


def parquet_format(name: str, hub: str, shape: Shape) -> Format:
    """Of the data set `name`, which hubs call `hub`, with images of `shape`."""
    return Format("Parquet files", (name, f"{name}/{hub}", f"{name}/data", ""), _find, partial(_read, shape))


def _find(names: Sequence[str]) -> tuple[list[str], list[str]]:
    found, problems = [], []
    for part in ("train", "test"):
        shard = re.compile(rf"{part}-(\d{{5}})-of-(\d{{5}})(-[0-9a-f]+)?\.parquet")
        own = [match for name in names if (match := shard.fullmatch(name))]
        total = own[0][2] if own else "00001"
        expected = [f"{number:05}" for number in range(int(total))]
        if missing := sorted(set(expected) - {match[1] for match in own}):
            problems.append(f"{part}-{missing[0]}-of-{total}.parquet is missing")
        elif [match[1] for match in own] != expected or any(match[2] != total for match in own):
            shown = ", ".join(match[0] for match in own)
            problems.append(f"got {shown}, expected {int(total)} files of {part}, each once; keep one set of them")
        found += [match[0] for match in own]
    return found, problems


def _read(shape: Shape, files: Sequence[Path]) -> Iterator[Part]:
    for path in files:
        with parquet_file(path) as file:
            image, label = _columns(path, file.schema_arrow)
            # Threads of Arrow that still run when Python ends would abort the process.
            table = file.read(columns=[f"{image}.bytes", label], use_threads=False)
            images = [row and row["bytes"] for row in table[image].to_pylist()]
            labels = table[label].to_pylist()
        called = [f"{path}, row {row} (from 0)" for row in range(len(images))]
        for what, column in (("image", images), ("label", labels)):
            if None in column:
                row = called[column.index(None)]
                raise DataError(f"{row}: got no {what}, expected one; fetch the file again")
        yield str(path), decode(images, called, shape), np.array(labels, dtype=np.int64)


def _columns(path: Path, schema: Any) -> tuple[str, str]:
    columns = {field.name: str(field.type) for field in schema}
    image, label = (next((each for each in known if each in columns), "") for known in (_IMAGES, _LABELS))
    binary = re.match(r"struct<(.*, )?bytes: (large_)?binary\b", columns.get(image, ""))
    if not binary or not re.fullmatch(r"u?int\d+", columns.get(label, "")):
        raise DataError(
            f"{path}: got columns {columns}, expected {' or '.join(_IMAGES)} (struct with bytes) and "
            f"{' or '.join(_LABELS)} (whole numbers); the file is of another data set or layout"
        )
    return image, label
