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
from typing import Any
from unittest.mock import Mock, call

import numba
import numpy as np
import pytest
from small import SMALL as SHORT
from small import Crash, Crashing, Ends, Pressing

import pfedlms
from pfedlms import backend
from pfedlms.errors import RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.callbacks import Callback
from pfedlms.experiment.loop import ActiveRun
from pfedlms.experiment.store import RunDirectory

SMALL: dict[str, Any] = {key: value for key, value in SHORT.items() if key != "progress"}
RUN: dict[str, Any] = {**SHORT, "rounds": 5, "method": "fedavg"}


def test_callbacks_are_told_every_round_every_evaluation_and_the_end() -> None:
    noting = Mock(spec=["on_round", "on_evaluation", "on_end"])
    settings = {**RUN, "rounds": 4, "participation": 0.5, "evaluate_every": 2}
    result = pfedlms.run(callbacks=[noting], **settings)
    told = [(kind.removeprefix("on_"), record) for kind, (_, record), _ in noting.method_calls]
    assert [(kind, record.get("round")) for kind, record in told] == [
        ("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("round", 4), ("evaluation", 4), ("end", None),
    ]  # fmt: skip
    assert [record for kind, record in told if kind == "evaluation"] == result.metrics
    assert told[-1][1] == result.summary
    rounds = [record for kind, record in told if kind == "round"]
    assert [list(record["participants"]) for record in rounds[1::2]] == [r["clients"] for r in result.metrics]
    assert sum(sum(record["bytes"].values()) for record in rounds) == result.summary["total_bytes"]
    assert {run.name for _, (run, _), _ in noting.method_calls} == {"fedavg seed 0"}


@pytest.mark.parametrize("callbacks", [[object()], Callback(), "tensorboard", [Callback]])
def test_what_is_no_callback_is_refused(callbacks: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of objects with on_round, on_evaluation or on_end"):
        pfedlms.run(callbacks=callbacks, **SMALL)


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
    assert b"3/3" in shown


def test_progress_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pfedlms.run(method="local", **SMALL)
    assert capsys.readouterr().err == ""  # no terminal here
    pfedlms.run(method="local", progress=True, **SMALL)
    assert "local seed 0: round 3/3" in capsys.readouterr().err


def test_compilation_is_said_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []

    def compile_two(run: pfedlms.RunInfo, record: Any) -> None:
        for shift in (1, 2) if record["round"] == 2 else ():
            began = time.perf_counter()
            numba.njit(lambda x, shift=shift: np.sort(x) + np.sort(x[::-1]) + shift)(np.zeros(3))
            spent.append(time.perf_counter() - began)

    pfedlms.run(method="local", **SMALL)  # its own kernels are compiled, or loaded
    monkeypatch.setattr(backend, "_WORTH_ANNOUNCING", 0.01)
    progress, before = Mock(spec=["on_compile", "on_evaluation"]), backend.COMPILATION.seconds
    progress.on_evaluation.side_effect = compile_two
    began = time.perf_counter()
    summary = pfedlms.run(method="local", callbacks=[progress], **SMALL).summary
    wall, compiled = time.perf_counter() - began, backend.COMPILATION.seconds - before
    assert 0.5 * sum(spent) < compiled <= sum(spent)
    assert summary["seconds"] <= wall - compiled + 0.001
    assert progress.on_compile.call_count == 1  # when it had taken some time


def test_tensorboard_gets_what_metrics_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writers: dict[str, Mock] = {}
    module = Mock(SummaryWriter=lambda folder: writers.setdefault(Path(folder).name, Mock()))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = pfedlms.tracking.TensorBoard(tmp_path / "tb")
    comparison = pfedlms.compare(methods="fedavg,fedavg:server_step=2", seeds=1, callbacks=[board], **SMALL)
    assert list(writers) == ["fedavg-seed-0", "fedavg-server_step=2-seed-0"]
    for writer, run in zip(writers.values(), comparison.runs, strict=True):
        assert "learning_rate" in writer.add_text.call_args.args[1]
        assert writer.method_calls[-1] == call.close()
        written = [each.args for each in writer.add_scalar.call_args_list]
        for name in ("p_acc", "g_acc", "loss"):
            measured = [(name, record[name], record["round"]) for record in run.metrics]
            assert [each for each in written if each[0] == name] == measured
        assert not [each for each in written if each[0] == "v_acc"]


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'pfedlms\[tracking\]'"):
        pfedlms.tracking.TensorBoard("tb")


def test_ctrl_c_in_a_run_is_raised_after_the_checkpoint(tmp_path: Path) -> None:
    whole = pfedlms.run(out=tmp_path / "whole", **RUN)
    pressing, before = Pressing(2), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
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


def test_sigterm_leaves_as_it_would_have(tmp_path: Path) -> None:
    pressing = Pressing(3, number=signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        pfedlms.sweep(learning_rate=[0.1, 0.2], validation=0.2, out=tmp_path / "s", callbacks=[pressing], **RUN)
    assert caught.value.code == 143
    assert pressing.ends == [("interrupted", 3)]
    done = pfedlms.resume(tmp_path / "s", progress=False)
    assert [run["status"] for run in done.summaries] == ["finished"] * 2


@pytest.mark.parametrize(
    ("where", "at", "ended"),
    [
        (["on_round"], 2, ("failed", 2)),
        (["on_evaluation"], 1, ("failed", 1)),
        (["on_end"], 5, ("finished", 5)),
        (["on_round", "on_end"], 2, ("failed", 2)),
    ],
)
def test_the_end_is_told_once_to_everybody(where: list[str], at: int, ended: tuple[str, int], tmp_path: Path) -> None:
    first, other = Crashing(at, where=where), Ends()
    with pytest.raises(Crash, match=where[0]) as caught:
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
    noted = Ends()
    with pytest.raises(StorageError):
        pfedlms.run(out=tmp_path / "r", callbacks=[noted], **RUN)
    assert noted.ends == [("failed", 5)]


@pytest.mark.parametrize("error", [RunDirectoryError("broken"), StorageError(Path("r"), "no space", Path("r"))])
def test_a_run_that_never_began_has_no_end(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ActiveRun, checkpoint: Any) -> None:
        raise error

    monkeypatch.setattr(ActiveRun, "restore", broken)
    noted = Ends()
    with pytest.raises(type(error)):
        pfedlms.run(callbacks=[noted], **RUN)
    assert noted.ends == []
