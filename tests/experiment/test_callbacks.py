"""Who is told what: callbacks, progress in Python, TensorBoard; and what does not count as training time."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

import pfedlms
from pfedlms import backend
from pfedlms.errors import UsageError
from pfedlms.experiment.callbacks import Callback

SMALL: dict[str, Any] = {"rounds": 4, "clients": 4, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1}


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


@pytest.mark.parametrize("callbacks", [[object()], [print], Noting(), "tensorboard", [Noting], 3])
def test_what_is_no_callback_is_refused(callbacks: Any) -> None:
    with pytest.raises(UsageError, match="expected a list of objects with on_round, on_evaluation or on_end"):
        pfedlms.run(callbacks=callbacks, **SMALL)


# --- progress ---

SCRIPT = f"import pfedlms; pfedlms.run(method='local', **{SMALL})"


def test_python_shows_progress_on_a_terminal_and_not_in_a_pipe() -> None:
    piped = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert piped.stdout + piped.stderr == ""
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
        assert [(value, step) for key, value, step in written if key == name] == [
            (r[name], r["round"]) for r in metrics
        ]
    assert not [key for key, _, _ in written if key == "v_acc"]


def test_tensorboard_writes_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pfedlms.run(method="local", callbacks=[pfedlms.tracking.TensorBoard(tmp_path / "tb")], **SMALL)
    assert list((tmp_path / "tb" / "local-seed-0").glob("events*"))


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'pfedlms\[tracking\]'"):
        pfedlms.tracking.TensorBoard("tb")
