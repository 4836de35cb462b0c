"""Results that are kept name the commit they were measured at."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
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
