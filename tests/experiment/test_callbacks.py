"""Callbacks, progress in Python and TensorBoard; how a run ends after Ctrl-C; `on_end` is called once in every case."""

from __future__ import annotations

import io
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numba
import numpy as np
import pytest
from small import SMALL as SHORT
from small import Crash, CrashAt, RecordEnds, SendSignal

import pfedlms
from pfedlms import backend
from pfedlms.errors import RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.callbacks import Callback
from pfedlms.experiment.loop import ActiveRun
from pfedlms.experiment.store import RunDirectory

SMALL: dict[str, Any] = {key: value for key, value in SHORT.items() if key != "progress"}
RUN: dict[str, Any] = {**SHORT, "rounds": 5, "method": "fedavg"}


def test_callbacks_are_called_for_every_round_every_evaluation_and_the_end() -> None:
    recorder = Mock(spec=["on_round", "on_evaluation", "on_end"])
    settings = {**RUN, "rounds": 4, "participation": 0.5, "evaluate_every": 2}
    result = pfedlms.run(callbacks=[recorder], **settings)
    calls = [(kind.removeprefix("on_"), record) for kind, (_, record), _ in recorder.method_calls]
    assert [(kind, record.get("round")) for kind, record in calls] == [
        ("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("round", 4), ("evaluation", 4), ("end", None),
    ]  # fmt: skip
    assert [record for kind, record in calls if kind == "evaluation"] == result.metrics
    assert calls[-1][1] == result.summary
    rounds = [record for kind, record in calls if kind == "round"]
    assert [list(record["participants"]) for record in rounds[1::2]] == [r["clients"] for r in result.metrics]
    assert sum(sum(record["bytes"].values()) for record in rounds) == result.summary["total_bytes"]
    assert {run.name for _, (run, _), _ in recorder.method_calls} == {"fedavg seed 0"}


class TakesAll(Callback):
    """Takes everything out of the records it gets."""

    def on_round(self, run: Any, record: Any) -> None:
        record.clear()

    def on_evaluation(self, run: Any, record: Any) -> None:
        record["client_acc"].clear()
        record.clear()

    def on_end(self, run: Any, summary: Any) -> None:
        summary.clear()


def test_a_callback_that_changes_its_record_changes_no_result(tmp_path: Path) -> None:
    results = [pfedlms.run(callbacks=each, out=tmp_path / str(len(each)), **RUN) for each in ([], [TakesAll()])]
    assert results[1].summary["accuracy"] == results[0].summary["accuracy"]
    for key in ("p_acc", "client_acc"):
        assert [line[key] for line in results[1].metrics] == [line[key] for line in results[0].metrics]


@pytest.mark.parametrize("callbacks", [[object()], "tensorboard", [Callback]])
def test_an_object_without_callback_methods_is_refused(callbacks: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of objects with on_round, on_evaluation or on_end"):
        pfedlms.run(callbacks=callbacks, **SMALL)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_python_shows_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    pfedlms.run(method="local", **SMALL)
    assert "local seed 0" in sys.stderr.getvalue()
    assert "3/3" in sys.stderr.getvalue()


def test_without_a_terminal_progress_is_shown_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    pfedlms.run(method="local", **SMALL)
    assert capsys.readouterr().err == ""  # no terminal here
    pfedlms.run(method="local", progress=True, **SMALL)
    assert "local seed 0: round 3/3" in capsys.readouterr().err


def test_compilation_is_announced_once_and_left_out_of_the_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []

    def compile_two_kernels(run: pfedlms.RunInfo, record: Any) -> None:
        for shift in (1, 2) if record["round"] == 2 else ():
            began = time.perf_counter()
            numba.njit(lambda x, shift=shift: np.sort(x) + np.sort(x[::-1]) + shift)(np.zeros(3))
            spent.append(time.perf_counter() - began)

    pfedlms.run(method="local", **SMALL)  # compiles or loads the kernels that every run uses
    monkeypatch.setattr(backend, "_WORTH_ANNOUNCING", 0.01)
    progress, before = Mock(spec=["on_compile", "on_evaluation"]), backend.COMPILATION.seconds
    progress.on_evaluation.side_effect = compile_two_kernels
    began = time.perf_counter()
    summary = pfedlms.run(method="local", callbacks=[progress], **SMALL).summary
    wall, compiled = time.perf_counter() - began, backend.COMPILATION.seconds - before
    assert 0.5 * sum(spent) < compiled <= sum(spent)
    assert summary["seconds"] <= wall - compiled + 0.001
    assert progress.on_compile.call_count == 1


def test_tensorboard_records_the_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'pfedlms\[tracking\]'"):
        pfedlms.tracking.TensorBoard("tb")


def test_ctrl_c_in_a_run_is_raised_after_the_checkpoint(tmp_path: Path) -> None:
    whole = pfedlms.run(out=tmp_path / "whole", **RUN)
    signaller, before = SendSignal(2), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.run(out=tmp_path / "cut", callbacks=[signaller], **RUN)
    assert signal.getsignal(signal.SIGINT) is before
    result = caught.value.result
    assert (result.summary["status"], result.summary["rounds"], len(result.metrics)) == ("interrupted", 2, 2)
    assert signaller.ends == [("interrupted", 2)]
    checkpoint = RunDirectory(tmp_path / "cut").load_checkpoint()
    assert checkpoint["federation"]["rounds_played"] == 2  # though run.checkpoint_every is 10
    with pytest.raises(KeyboardInterrupt):  # a resumed run is interrupted in the same way
        pfedlms.resume(tmp_path / "cut", callbacks=[SendSignal(4)], progress=False)
    resumed = pfedlms.resume(tmp_path / "cut", progress=False)
    assert [record["p_acc"] for record in resumed.metrics] == [record["p_acc"] for record in whole.metrics]


@pytest.mark.parametrize(("at", "status"), [(2, "interrupted"), (5, "finished")])
def test_the_interrupt_carries_the_result_of_a_run_without_a_folder(at: int, status: str) -> None:
    """KeyboardInterrupt is raised in the last round, too, so that Ctrl-C also leaves a loop over runs."""
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted$") as caught:
        pfedlms.run(callbacks=[SendSignal(at)], **RUN)
    result = caught.value.result
    assert (len(result.models), result.summary["status"]) == (4, status)


def test_a_second_ctrl_c_ends_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    signaller = SendSignal(2, times=2)
    with pytest.raises(KeyboardInterrupt):
        pfedlms.run(out=tmp_path / "r", callbacks=[signaller], **RUN)
    assert signaller.ends == [("interrupted", 2)]
    assert RunDirectory(tmp_path / "r").load_checkpoint() is None
    assert pfedlms.resume(tmp_path / "r", progress=False).summary["status"] == "finished"


@pytest.mark.parametrize(
    ("where", "at", "end"),
    [
        (["on_round"], 2, ("failed", 2)),
        (["on_evaluation"], 1, ("failed", 1)),
        (["on_end"], 5, ("finished", 5)),
        (["on_round", "on_end"], 2, ("failed", 2)),
    ],
)
def test_every_on_end_is_called_once(where: list[str], at: int, end: tuple[str, int], tmp_path: Path) -> None:
    first, other = CrashAt(at, where=where), RecordEnds()
    with pytest.raises(Crash, match=where[0]) as caught:
        pfedlms.run(out=tmp_path / "r", callbacks=[first, other], **RUN)
    notes = getattr(caught.value, "__notes__", [])
    assert notes == (["on_end failed, too: Crash: on_end"] if len(where) > 1 else [])
    assert first.ends == other.ends == [end]
    assert (RunDirectory(tmp_path / "r").read_summary() is None) == (end[0] == "failed")  # it can be resumed
    resumed = pfedlms.resume(tmp_path / "r", progress=False)
    assert (resumed.summary["status"], resumed.summary["rounds"]) == ("finished", 5)


def test_a_run_whose_last_write_fails_ends_as_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail_to_write(self: RunDirectory, summary: Any) -> None:
        raise StorageError(self.path, "no space", self.path)

    monkeypatch.setattr(RunDirectory, "write_summary", fail_to_write)
    recorder = RecordEnds()
    with pytest.raises(StorageError):
        pfedlms.run(out=tmp_path / "r", callbacks=[recorder], **RUN)
    assert recorder.ends == [("failed", 5)]


@pytest.mark.parametrize("error", [RunDirectoryError("broken"), StorageError(Path("r"), "no space", Path("r"))])
def test_on_end_is_not_called_for_a_run_that_never_began(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_restore(self: ActiveRun, checkpoint: Any) -> None:
        raise error

    monkeypatch.setattr(ActiveRun, "restore", fail_to_restore)
    recorder = RecordEnds()
    with pytest.raises(type(error)):
        pfedlms.run(callbacks=[recorder], **RUN)
    assert recorder.ends == []
