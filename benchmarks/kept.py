"""Results that are kept name the commit they were measured at."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Of this checkout, with a + behind it where its files were changed; PFEDLMS_COMMIT where there is no .git to ask,
    and nothing without either."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return os.environ.get("PFEDLMS_COMMIT", "") if asked.returncode else asked.stdout.strip()


def keep(result: Mapping[str, Any], file: Path) -> None:
    """Write what a benchmark measured."""
    file.write_text(json.dumps({"commit": commit() or "unknown", **result}, indent=2) + "\n")


def keep_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write rows, one per line."""
    made_at = commit() or "unknown"
    lines = ",\n".join(json.dumps({"commit": made_at, **row}, allow_nan=False) for row in rows)
    file.write_text(f"[\n{lines}\n]\n")
