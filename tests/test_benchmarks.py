"""Benchmarks can be imported, and two of them run in a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
OTHER_ENVIRONMENT = {
    "peers",
    "soak",
    "soak_checks",
    "soak_samples",
    "doors",
    "doors_end_to_end",
    "gate_cost",
    "mutations",
}
"""Benchmarks that need another environment."""


def test_benchmarks_import() -> None:
    """In a process of its own: some register methods."""
    names = sorted({file.stem for file in FOLDER.glob("*.py")} - OTHER_ENVIRONMENT)
    assert len(names) > 20
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "engine.py --model dnn --clients 3 --samples 40 --steps 2 --batch 8 --repeats 1 --device cpu --methods zsign",
        "growth.py --method local --clients 4 --participants 2 --steps 2 --batch 8 --rounds 1 --warm-up 1 "
        "--per-client 20 --shape 1,8,8 --device cpu",
    ],
)
def test_a_small_benchmark_runs(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=FOLDER, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
