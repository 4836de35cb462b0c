"""Studies whose runs train in worker processes: the same results, and an end whatever happens to a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import SMALL, X, Y, half_accuracy, linear, without_timings
from torch import nn

import pfedlms
from pfedlms.errors import RunError, StorageError, UsageError
from pfedlms.methods import METHODS
from pfedlms.methods.local import Local


def test_workers_measure_the_same_as_one_process(tmp_path: Path) -> None:
    ended: list[str] = []
    recorder = SimpleNamespace(on_end=lambda run, summary: ended.append(run.name))
    options: dict[str, Any] = {"methods": "local,fedavg", "seeds": 2, "metric": half_accuracy, **SMALL}
    in_workers = pfedlms.compare((X, Y), linear, out=tmp_path / "apart", workers=2, callbacks=[recorder], **options)
    in_one_process = pfedlms.compare((X, Y), linear, **options)
    for ours, theirs in zip(in_workers.runs, in_one_process.runs, strict=True):
        assert (ours.label, without_timings(ours.metrics)) == (theirs.label, without_timings(theirs.metrics))
    assert sorted(ended) == [f"{method} seed {seed}" for method in ("fedavg", "local") for seed in (0, 1)]
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        pfedlms.compare((X, Y), lambda: linear(), out=tmp_path / "no", workers=2, **options)
    with pytest.raises(UsageError, match="out=DIR"):
        pfedlms.compare((X, Y), linear, workers=2, **options)
    swept: dict[str, Any] = {"learning_rate": [0.1, 1e30], "validation": 0.2, "workers": 2, "out": tmp_path / "d"}
    with pytest.warns(UserWarning, match="diverged"):
        broken = pfedlms.sweep(method="local", **swept, **SMALL)
    assert [run.summary["status"] for run in broken.runs] == ["finished", "diverged"]


OWN_METHOD = """
from pfedlms.methods import register
from pfedlms.methods.local import Local

@register
class Own(Local):
    name = "own"
"""


def test_workers_know_a_method_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is in a module that can be imported; else it is refused in a sentence, and other methods are not."""
    (tmp_path / "module_of_own.py").write_text(OWN_METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(METHODS, "own", Local)  # which is put back after the test
    del METHODS["own"]
    import_module("module_of_own")
    options: dict[str, Any] = {"methods": "own", "seeds": 1, "workers": 2, **SMALL}
    assert pfedlms.compare((X, Y), linear, out=tmp_path / "s", **options).runs[0].finished
    for module in ("__main__", "loaded_by_its_path"):
        del METHODS["own"]
        for _ in range(2):  # a cell of a notebook may be run again
            exec(OWN_METHOD, {"__name__": module})
        with pytest.raises(RunError, match="the method 'own' is not known in another process; put it into a module"):
            pfedlms.compare((X, Y), linear, out=tmp_path / f"run of {module}", **options)


def exit_in_a_worker() -> nn.Module:
    """Ends the process if it is a worker."""
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return linear()


def test_a_worker_that_dies_fails_only_its_own_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="local seed . failed: .*its process ended with code 3"):
        done = pfedlms.compare(
            (X, Y), exit_in_a_worker, methods="local", seeds=2, workers=2, out=tmp_path / "s", **SMALL
        )
    assert [run.summary["status"] for run in done.runs] == ["failed", "failed"]
    for resume in (pfedlms.load(tmp_path / "s").resume, lambda: pfedlms.resume(tmp_path / "s")):
        with pytest.raises(UsageError, match=r"this run's data was .* pfedlms\.resume\('.*/s', data, model\)"):
            resume()
    again = pfedlms.resume(tmp_path / "s", (X, Y), linear)
    assert [run.summary["status"] for run in again.runs] == ["finished", "finished"]
    assert [run.summary for run in pfedlms.resume(tmp_path / "s").runs] == [run.summary for run in again.runs]


def refusing() -> nn.Module:
    """Ends its run with an error in a worker."""
    if multiprocessing.parent_process() is not None:
        raise UsageError("not here")
    return linear()


def without_room() -> nn.Module:
    """Ends its run in a worker as a full disk does."""
    if multiprocessing.parent_process() is not None:
        raise StorageError("run", "no space")
    return linear()


@pytest.mark.parametrize(
    ("model", "message"), [(refusing, "not here"), (without_room, r"no space.*pfedlms\.resume\('.*/s', data, model\)")]
)
def test_no_worker_outlives_a_study_that_an_error_ends(
    tmp_path: Path, model: Callable[[], nn.Module], message: str
) -> None:
    """The error holds the frames of the study. A worker that waits for its next run keeps the program from ending. A
    full disk names the call that resumes the study, and not that of one run."""
    with pytest.raises(RunError, match=message):
        pfedlms.compare((X, Y), model, methods="local", seeds=2, workers=2, out=tmp_path / "s", **SMALL)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_workers_of_a_study_that_is_stopped_save_their_round_and_end(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pfedlms", "compare", "--methods", "local", "--seeds", "2", "--workers", "2"]
    settings = ["--rounds", "1000000", "--local-steps", "1", "--out", str(tmp_path / "s")]
    study = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folders = [tmp_path / "s" / f"local-seed{seed}" for seed in (0, 1)]
    wait_until(lambda: all((folder / "metrics.jsonl").exists() for folder in folders))
    study.send_signal(signal.Signals[name])
    study.wait()
    wait_until(lambda: all((folder / "summary.json").exists() for folder in folders))
    if name == "SIGINT":  # the study itself ends in order, and its table has the runs of both workers
        assert len((tmp_path / "s" / "results.csv").read_text().splitlines()) == 1 + 2
    assert [pfedlms.load(folder).summary["status"] for folder in folders] == ["interrupted", "interrupted"]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_signal_ends_a_study_with_workers(tmp_path: Path) -> None:
    """SIGTERM ends the program with 143, as in a study in one process; the same call resumes it."""
    stop = SimpleNamespace(on_start=lambda run: signal.raise_signal(signal.SIGTERM))
    options: dict[str, Any] = {"methods": "local", "seeds": 2, "workers": 2, "out": tmp_path / "s", **SMALL}
    with pytest.raises(SystemExit) as caught:
        pfedlms.compare((X, Y), linear, callbacks=[stop], **options)
    assert caught.value.code == 128 + signal.SIGTERM
    assert not pfedlms.compare((X, Y), linear, **options).interrupted
