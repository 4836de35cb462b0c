"""Comparisons: their runs are those of runs alone, and one that fails or is stopped leaves the others to go on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Pressing, stripped
from torch import nn

import pfedlms
from pfedlms import rng
from pfedlms.errors import PfedlmsError, RunDirectoryError
from pfedlms.experiment.studies import resume_all

SEEDS = 3
METHODS = ["pfedlms", "fedavg"]
SMALL = {"rounds": 3, "clients": 5, "hidden": 16, "local_steps": 2, "batch_size": 8, "threads": 1}


def test_a_comparison_measures_what_its_runs_measure_alone() -> None:
    runs = pfedlms.compare("digits", methods=METHODS, seeds=SEEDS, **SMALL).summaries
    alone = [pfedlms.run("digits", method=m, seed=s, **SMALL).summary for m in METHODS for s in range(SEEDS)]
    assert stripped(runs) == stripped(alone)
    assert len({run["accuracy"]["final"] for run in runs}) > SEEDS  # so a mix-up would show


HUGE = 1


def growing() -> nn.Module:
    """Weights that a huge weight decay multiplies by −11 in every step; those of one seed start at 3 · 10³⁰."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    if torch.initial_seed() == rng.stream(HUGE, "initial") % (1 << 63):
        nn.init.constant_(module[1].weight, 3e30)
    return module


def test_a_seed_that_diverges_does_not_take_the_others_with_it() -> None:
    options = {**SMALL, "learning_rate": 1.0, "weight_decay": 12.0, "rounds": 4}
    with pytest.warns(UserWarning, match=f"seed {HUGE} diverged: round 3"):
        runs = pfedlms.compare("digits", growing, methods=["fedavg"], seeds=SEEDS, **options).summaries
    ends = [(run["seed"], run["status"], run["rounds"]) for run in runs]
    assert ends == [(0, "finished", 4), (1, "diverged", 2), (2, "finished", 4)]


def stored(out: Path) -> tuple[list[Any], list[Any]]:
    """Summaries and metrics of all runs in a folder."""
    folders = [out / f"{method}-seed{seed}" for method in METHODS for seed in range(SEEDS)]
    lines = [line for folder in folders for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    return stripped(summaries), stripped([json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    out = tmp_path_factory.mktemp("whole") / "c"
    pfedlms.compare(methods=METHODS, seeds=SEEDS, out=out, **{**SMALL, "rounds": 4})
    return stored(out)


def test_a_seed_that_was_finished_alone_is_not_in_the_way_of_the_others(
    tmp_path: Path, uninterrupted: tuple[list[Any], list[Any]]
) -> None:
    out = tmp_path / "c"
    options = {**SMALL, "rounds": 4}
    with pytest.raises(KeyboardInterrupt):
        pfedlms.compare(methods=METHODS, seeds=SEEDS, out=out, callbacks=[Pressing(2, of=0)], **options)
    assert pfedlms.resume(out / "pfedlms-seed1").summary["status"] == "finished"
    resume_all(out)
    assert stored(out) == uninterrupted


@pytest.mark.parametrize("broken", ["checkpoint.pt", "config.toml"])
def test_a_run_that_cannot_go_on_leaves_no_other_locked(broken: str, tmp_path: Path) -> None:
    """One is found while a run is opened, the other when it begins."""
    out = tmp_path / "c"
    options = {**SMALL, "learning_rate": 0.1}
    with pytest.raises(KeyboardInterrupt):
        pfedlms.compare(methods=["fedavg"], seeds=SEEDS, out=out, callbacks=[Pressing(1, of=1)], **options)
    file = out / "fedavg-seed1" / broken
    file.write_bytes(file.read_bytes().replace(b"learning_rate = 0.1", b"learning_rate = 0.2")[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(RunDirectoryError) as caught:
            resume_all(out)
        held = [file for file in Path("/proc/self/fd").iterdir() if str(file.resolve()).startswith(str(out))]
        del caught  # until then nothing is collected
    assert not held


def test_a_run_of_a_comparison_keeps_its_own_data(tmp_path: Path) -> None:
    """A folder whose config.toml was changed before it began must not be trained on the others' samples."""
    pfedlms.compare("digits", methods=["local"], seeds=2, rounds=1, clients=3, out=tmp_path / "c")
    folder = tmp_path / "c" / "local-seed1"
    for name in ("checkpoint.pt", "metrics.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('dataset = "digits"', 'dataset = "mnist"'))
    with pytest.raises(PfedlmsError, match="mnist"):
        resume_all(tmp_path / "c")
