"""Benchmarks that no test runs at least import what there is today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"
APART = {"peers", "soak", "soak_checks", "soak_samples", "doors", "doors_end_to_end", "gate_cost", "mutations"}
"""Those that need another environment."""


def test_benchmarks_import() -> None:
    """In a process of its own: some register methods."""
    names = sorted({file.stem for file in FOLDER.glob("*.py")} - APART)
    assert len(names) > 20
    ended = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
