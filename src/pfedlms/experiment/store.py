"""A run directory. Its files are written so that a crash at any moment loses nothing.

config.toml      complete configuration; `pfedlms run config.toml` repeats the run
metrics.jsonl    one line per evaluation, appended
checkpoint.pt    latest full state, and the length of metrics.jsonl at that time
best.pt          with `train.patience`: the checkpoint of the round with the highest V-acc
summary.json     results and cost of the run
nodes.txt        marks a run on nodes
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from pfedlms.errors import RunDirectoryError, StorageError, resume_command
from pfedlms.files import DISK_FULL, write_atomically, write_text

SCHEMA = 2
RESTART_SERVER = "start the server again (./run.sh)"
"""How a run on nodes is resumed."""
MANIFEST = "study.json"
"""The file that makes a folder the folder of a study."""


class RunDirectory(ExitStack):
    """The files of one run. One process at a time holds a lock, from `create` or `open` to the end of the `with`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.config = path, path / "config.toml"
        self._metrics, self._summary, self._checkpoint, self._best = (
            path / name for name in ("metrics.jsonl", "summary.json", "checkpoint.pt", "best.pt")
        )
        self._nodes = path / "nodes.txt"

    def create(self, config: str) -> None:
        """Make the directory; refuse one that already holds a run or a study."""
        try:
            if is_study(self.path):
                raise RunDirectoryError(f"{self.path}: holds a study already; name another out=DIR")
            if self.config.exists():
                remedy = RESTART_SERVER if self.on_nodes else f"resume it by `{resume_command(self.path)}`"
                raise RunDirectoryError(f"{self.path}: holds a run already; {remedy}, or name another out=DIR")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            write_text(self.config, config)
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            reason = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) in DISK_FULL:
                raise StorageError(self.path, str(reason)) from error
            raise RunDirectoryError(f"{self.path}: cannot be written ({reason}); name another out=DIR") from error

    def open(self) -> None:
        """Lock an existing directory, to resume its run."""
        try:
            self._lock()
        except OSError as error:
            raise RunDirectoryError(f"{self.path}: cannot be written ({error.strerror})") from error

    @property
    def has_checkpoint(self) -> bool:
        return self._checkpoint.exists()

    @property
    def on_nodes(self) -> bool:
        """Whether the clients of the run are nodes: they keep their models, this folder has none."""
        return self._nodes.exists()

    def mark_on_nodes(self) -> None:
        """Mark this as the directory of a run whose clients are nodes, before there is a checkpoint."""
        if not self._nodes.exists():
            text = f"The clients of this run are nodes, which keep their models. To resume: {RESTART_SERVER}.\n"
            with self._storage_errors():
                write_text(self._nodes, text)

    def _lock(self) -> None:
        lock = self.enter_context(open(self.path / ".lock", "wb"))  # noqa: SIM115 - until the `with` ends
        for attempt in range(10):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if attempt == 9:
                    raise RunDirectoryError(
                        f"{self.path}: another process is running here; wait for it or name another out=DIR"
                    ) from error
                time.sleep(0.05)  # `is_locked` of another process holds it for a moment

    @property
    def is_locked(self) -> bool:
        """Whether a process trains the run now."""
        try:
            with open(self.path / ".lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is none yet
            return False
        return False

    def append_metrics(self, record: dict[str, Any]) -> None:
        with self._storage_errors(), open(self._metrics, "ab") as file:
            file.write(json.dumps(record).encode() + b"\n")

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; it belongs to the lines of metrics.jsonl written so far."""
        with self._storage_errors():
            length = 0
            if self._metrics.exists():
                with open(self._metrics, "rb") as file:
                    os.fsync(file.fileno())
                    length = os.fstat(file.fileno()).st_size
            content = {"schema": SCHEMA, "metrics_bytes": length, **state}
            write_atomically(self._checkpoint, lambda file: torch.save(content, file))

    def keep_best(self) -> None:
        """Make the checkpoint just saved best.pt. It is a hard link, so nothing is written twice; the next checkpoint
        replaces checkpoint.pt alone."""
        with self._storage_errors():
            if self._best.exists() and filecmp.cmp(self._checkpoint, self._best, shallow=False):
                return
            temporary = self._best.with_name(self._best.name + ".tmp")
            temporary.unlink(missing_ok=True)
            try:
                os.link(self._checkpoint, temporary)
            except OSError:  # not every file system has links
                shutil.copyfile(self._checkpoint, temporary)
            os.replace(temporary, self._best)

    def load_checkpoint(self, best: bool = False) -> dict[str, Any] | None:
        """The latest checkpoint, or that of the best round so far; None if there is none."""
        path = self._best if best else self._checkpoint
        remedy = "delete it; the latest checkpoint is another file" if best else "delete it to start this run over"
        if not path.exists():
            return None
        try:
            state = load_tensors(path, torch.device("cpu"))
            schema = state["schema"]
        except Exception as error:  # damaged bytes can make the unpickler raise anything
            raise RunDirectoryError(f"{path}: cannot be read ({type(error).__name__}: {error}); {remedy}") from error
        if schema != SCHEMA:
            raise RunDirectoryError(
                f"{path}: got schema {schema!r}, expected {SCHEMA}; it is of another version of pfedlms"
            )
        return state

    def rewind_metrics(self, length: int) -> list[dict[str, Any]]:
        """Cut metrics.jsonl to its length at the checkpoint, and return its records."""
        with self._storage_errors():
            size = self._metrics.stat().st_size if self._metrics.exists() else 0
            if size < length:
                raise RunDirectoryError(
                    f"{self._metrics}: is missing or shorter than at the checkpoint; delete checkpoint.pt to start "
                    "this run over"
                )
            if size > length:
                os.truncate(self._metrics, length)
        return self.read_metrics()

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records, also of a run in progress: an incomplete last line is skipped."""
        try:
            lines = self._metrics.read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self._metrics}: cannot be read ({error}); delete it and checkpoint.pt to start this run over"
            ) from error

    def delete_summary(self) -> None:
        """Delete the summary of an earlier process, before a run starts over."""
        with self._storage_errors():
            self._summary.unlink(missing_ok=True)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary that an earlier process wrote; None if it is missing or cannot be read."""
        try:
            summary = json.loads(self._summary.read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        with self._storage_errors():
            write_text(self._summary, json.dumps(summary, indent=2) + "\n")

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Raise StorageError for whatever fails while a file is written."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise StorageError(self.path, reason, resume=None if self.on_nodes else self.path) from error


def load_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    """A dict that `torch.save` wrote, with its tensors on `device`. Damaged bytes can make it raise anything."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():  # torch.load itself compares no checksums
            raise ValueError(f"checksum of {damaged}")
    content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return content


def is_study(directory: Path) -> bool:
    """Whether a folder is the folder of a study."""
    return (directory / MANIFEST).is_file()
