"""How runs end in Python: Ctrl-C and SIGTERM once all is kept, and `on_end` exactly once, whatever happens."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from small import SMALL as SHORT
from small import Crash, Pressing

import pfedlms
from pfedlms.errors import DivergedError, RunDirectoryError, StorageError
from pfedlms.experiment.loop import Running
from pfedlms.experiment.store import RunDirectory

SMALL = {**SHORT, "rounds": 5}
RUN: dict[str, Any] = {**SMALL, "method": "fedavg"}


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


def test_without_a_folder_the_result_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted$") as caught:
        pfedlms.run(callbacks=[Pressing(2)], **RUN)
    assert len(caught.value.result.models) == 4  # type: ignore[attr-defined]


def test_ctrl_c_in_the_last_round_is_raised_too(tmp_path: Path) -> None:
    """Or a loop over runs could not be left."""
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted$") as caught:
        pfedlms.run(out=tmp_path / "r", callbacks=[Pressing(5)], **RUN)
    assert caught.value.result.summary["status"] == "finished"  # type: ignore[attr-defined]


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
        "compare": lambda **more: pfedlms.compare(methods="local,fedavg", seeds=1, **SMALL, **more),
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


def test_an_on_end_that_fails_hides_no_divergence() -> None:
    crashing = Crashing("on_end")
    with pytest.raises(DivergedError) as caught:
        pfedlms.run(callbacks=[crashing], learning_rate=1e30, **RUN)
    assert crashing.ends[0][0] == "diverged"
    assert len(crashing.ends) == 1
    assert caught.value.__notes__ == ["on_end failed, too: Crash: on_end"]


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
