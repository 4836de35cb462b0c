"""Callbacks, progress in Python and TensorBoard; and how runs end: Ctrl-C and SIGTERM once all is saved, `on_end` once,
whatever happens."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from small import SMALL as SHORT
from small import Crash, Pressing

import pfedlms
from pfedlms import backend
from pfedlms.errors import RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.callbacks import Callback
from pfedlms.experiment.loop import Running
from pfedlms.experiment.store import RunDirectory

SMALL: dict[str, Any] = {"rounds": 4, "clients": 4, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1}
LONG: dict[str, Any] = {**SHORT, "rounds": 5}
RUN: dict[str, Any] = {**LONG, "method": "fedavg"}


class Noting(pfedlms.Callback):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []

    def on_round(self, run: pfedlms.RunInfo, record: Any) -> None:
        self.told.append(("round", run.name, dict(record)))

    def on_evaluation(self, run: pfedlms.RunInfo, record: Any) -> None:
        self.told.append(("evaluation", run.name, dict(record)))

    def on_end(self, run: pfedlms.RunInfo, summary: Any) -> None:
        self.told.append(("end", run.name, dict(summary)))


def test_callbacks_are_told_every_round_every_evaluation_and_the_end() -> None:
    noting = Noting()
    result = pfedlms.run(method="fedavg", participation=0.5, evaluate_every=2, callbacks=[noting], **SMALL)
    order = [(kind, record.get("round")) for kind, _, record in noting.told]
    assert order == [
        ("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("round", 4), ("evaluation", 4), ("end", None),
    ]  # fmt: skip
    assert [record for kind, _, record in noting.told if kind == "evaluation"] == result.metrics
    assert noting.told[-1][2] == result.summary
    rounds = [record for kind, _, record in noting.told if kind == "round"]
    assert [list(record["participants"]) for record in rounds[1::2]] == [r["clients"] for r in result.metrics]
    sent = [sum(record["bytes"].values()) for record in rounds]
    assert sum(sent) == result.summary["total_bytes"]
    assert {name for _, name, _ in noting.told} == {"fedavg seed 0"}


@pytest.mark.parametrize("callbacks", [[object()], Noting(), "tensorboard", [Noting]])
def test_what_is_no_callback_is_refused(callbacks: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of objects with on_round, on_evaluation or on_end"):
        pfedlms.run(callbacks=callbacks, **SMALL)


# --- progress ---

SCRIPT = f"import pfedlms; pfedlms.run(method='local', **{SMALL})"


def test_python_shows_progress_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux: the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"local seed 0" in shown
    assert b"4/4" in shown


def test_progress_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pfedlms.run(method="local", **SMALL)
    assert capsys.readouterr().err == ""  # no terminal here
    pfedlms.run(method="local", progress=True, **SMALL)
    assert "local seed 0: round 4/4" in capsys.readouterr().err


# --- compilation ---


class Compiling(Callback):
    """Compiles two kernels in the middle of a run."""

    def __init__(self) -> None:
        self.spent, self.said = 0.0, 0

    def on_compile(self, run: Any) -> None:
        self.said += 1

    def on_evaluation(self, run: Any, record: Any) -> None:
        if record["round"] == 2:
            for shift in (1, 2):
                began = time.perf_counter()
                kernel = numba.njit(lambda x, shift=shift: np.sort(x) + np.sort(x[::-1]) + shift)
                kernel(np.zeros(3))
                self.spent += time.perf_counter() - began


def test_compilation_is_said_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pfedlms.run(method="local", **SMALL)  # its own kernels are compiled, or loaded
    monkeypatch.setattr(backend, "_WORTH_ANNOUNCING", 0.01)
    progress, before = Compiling(), backend.COMPILATION.seconds
    began = time.perf_counter()
    summary = pfedlms.run(method="local", callbacks=[progress], **SMALL).summary
    wall, compiled = time.perf_counter() - began, backend.COMPILATION.seconds - before
    assert 0.5 * progress.spent < compiled <= progress.spent
    assert summary["seconds"] <= wall - compiled + 0.001
    assert progress.said == 1  # once, when it had taken some time


# --- TensorBoard ---


class FakeWriter:
    written: dict[str, list[tuple[str, float, int]]]

    def __init__(self, folder: str) -> None:
        self._name = Path(folder).name
        FakeWriter.written[self._name] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        FakeWriter.written[self._name].append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        assert "learning_rate" in text

    def close(self) -> None:
        FakeWriter.written[f"{self._name} closed"] = []


def test_tensorboard_gets_what_metrics_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeWriter.written = {}
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = pfedlms.tracking.TensorBoard(tmp_path / "tb")
    comparison = pfedlms.compare(methods="fedavg,fedavg:server_step=2", seeds=1, callbacks=[board], **SMALL)
    assert list(FakeWriter.written) == [
        "fedavg-seed-0", "fedavg-seed-0 closed", "fedavg-server_step=2-seed-0", "fedavg-server_step=2-seed-0 closed",
    ]  # fmt: skip
    metrics = comparison.runs[0].metrics
    written = FakeWriter.written["fedavg-seed-0"]
    for name in ("p_acc", "g_acc", "loss"):
        measured = [(r[name], r["round"]) for r in metrics]
        assert [(value, step) for key, value, step in written if key == name] == measured
    assert not [key for key, _, _ in written if key == "v_acc"]


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'pfedlms\[tracking\]'"):
        pfedlms.tracking.TensorBoard("tb")


# --- Ctrl-C and SIGTERM ---


def test_ctrl_c_in_a_run_is_raised_after_the_checkpoint(tmp_path: Path) -> None:
    whole = pfedlms.run(out=tmp_path / "whole", **RUN)
    pressing, before = Pressing(2), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; resume with pfedlms\.resume\('.*/cut'\)") as caught:
        pfedlms.run(out=tmp_path / "cut", callbacks=[pressing], **RUN)
    assert signal.getsignal(signal.SIGINT) is before
    result = caught.value.result  # type: ignore[attr-defined]
    assert (result.summary["status"], result.summary["rounds"], len(result.metrics)) == ("interrupted", 2, 2)
    assert pressing.ends == [("interrupted", 2)]
    checkpoint = RunDirectory(tmp_path / "cut").load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["federation"]["rounds_played"] == 2  # though run.checkpoint_every is 10
    with pytest.raises(KeyboardInterrupt):  # going on with it is the same
        pfedlms.resume(tmp_path / "cut", callbacks=[Pressing(4)], progress=False)
    resumed = pfedlms.resume(tmp_path / "cut", progress=False)
    assert [record["p_acc"] for record in resumed.metrics] == [record["p_acc"] for record in whole.metrics]


@pytest.mark.parametrize(("at", "status"), [(2, "interrupted"), (5, "finished")])
def test_without_a_folder_the_result_is_not_lost(at: int, status: str) -> None:
    """In the last round it is raised, too, or a loop over runs could not be left."""
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted$") as caught:
        pfedlms.run(callbacks=[Pressing(at)], **RUN)
    result = caught.value.result  # type: ignore[attr-defined]
    assert (len(result.models), result.summary["status"]) == (4, status)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    pressing = Pressing(2, times=2)
    with pytest.raises(KeyboardInterrupt):
        pfedlms.run(out=tmp_path / "r", callbacks=[pressing], **RUN)
    assert pressing.ends == [("interrupted", 2)]
    assert RunDirectory(tmp_path / "r").load_checkpoint() is None
    assert pfedlms.resume(tmp_path / "r", progress=False).summary["status"] == "finished"


@pytest.mark.parametrize("kind", ["compare", "sweep"])
def test_sigterm_leaves_as_it_would_have(kind: str, tmp_path: Path) -> None:
    plays: dict[str, Any] = {
        "compare": lambda **more: pfedlms.compare(methods="local,fedavg", seeds=1, **LONG, **more),
        "sweep": lambda **more: pfedlms.sweep(learning_rate=[0.1, 0.2], validation=0.2, **RUN, **more),
    }
    pressing = Pressing(3, number=signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        plays[kind](out=tmp_path / "s", callbacks=[pressing])
    assert caught.value.code == 143
    assert pressing.ends == [("interrupted", 3)]
    done = pfedlms.resume_study(tmp_path / "s", progress=False)
    assert [run["status"] for run in done.summaries] == ["finished"] * 2


# --- on_end ---


class Crashing(pfedlms.Callback):
    """Raises in one of its calls, and counts the ends."""

    def __init__(self, *where: str) -> None:
        self.where = where
        self.ends: list[tuple[str, int]] = []

    def _tell(self, name: str) -> None:
        if name in self.where:
            raise Crash(name)

    def on_round(self, run: Any, record: Any) -> None:
        self._tell("on_round" if record["round"] == 2 else "")

    def on_evaluation(self, run: Any, record: Any) -> None:
        self._tell("on_evaluation")

    def on_end(self, run: Any, summary: Any) -> None:
        self.ends.append((summary["status"], summary["rounds"]))
        self._tell("on_end")


@pytest.mark.parametrize(
    ("where", "raised", "ended"),
    [
        ((), None, ("finished", 5)),
        (("on_round",), "on_round", ("failed", 2)),
        (("on_evaluation",), "on_evaluation", ("failed", 1)),
        (("on_end",), "on_end", ("finished", 5)),
        (("on_round", "on_end"), "on_round", ("failed", 2)),
    ],
)
def test_the_end_is_told_once_to_everybody(
    where: tuple[str, ...], raised: str | None, ended: tuple[str, int], tmp_path: Path
) -> None:
    first, other = Crashing(*where), Crashing()
    if raised is None:
        pfedlms.run(out=tmp_path / "r", callbacks=[first, other], **RUN)
    else:
        with pytest.raises(Crash, match=raised) as caught:
            pfedlms.run(out=tmp_path / "r", callbacks=[first, other], **RUN)
        notes = getattr(caught.value, "__notes__", [])
        assert notes == (["on_end failed, too: Crash: on_end"] if len(where) > 1 else [])
    assert first.ends == other.ends == [ended]
    assert (RunDirectory(tmp_path / "r").read_summary() is None) == (ended[0] == "failed")  # it can be resumed
    resumed = pfedlms.resume(tmp_path / "r", progress=False)
    assert (resumed.summary["status"], resumed.summary["rounds"]) == ("finished", 5)


def test_the_last_write_that_fails_is_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: RunDirectory, summary: Any) -> None:
        raise StorageError(self.path, "no space", self.path)

    monkeypatch.setattr(RunDirectory, "write_summary", full)
    crashing = Crashing()
    with pytest.raises(StorageError):
        pfedlms.run(out=tmp_path / "r", callbacks=[crashing], **RUN)
    assert crashing.ends == [("failed", 5)]


def test_a_run_that_never_began_has_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashing = Crashing()
    for error in (RunDirectoryError("broken"), StorageError(tmp_path, "no space", tmp_path)):
        monkeypatch.setattr(Running, "restore", lambda self, checkpoint, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            pfedlms.run(callbacks=[crashing], **RUN)
    assert crashing.ends == []
