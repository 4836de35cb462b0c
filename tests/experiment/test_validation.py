"""`data.validation`: samples that are not trained on, and V-acc. `train.patience`: when a run stops by V-acc, the
models of its best round, and that a resumed run stops in the same round."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import Crash, CrashAt, accuracy_of_models, assert_same_run, network, same_models

import pfedlms
from factories import federation, same
from pfedlms.cli import main
from pfedlms.data import Partitioning, from_pool, load_dataset
from pfedlms.engine import Evaluation, Federation, RoundReport
from pfedlms.errors import RunDirectoryError
from pfedlms.experiment import store
from pfedlms.experiment.store import RunDirectory
from pfedlms.methods import METHODS
from pfedlms.report.progress import evaluation_text

SMALL = {"clients": 5, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1, "validation": 0.25}


@contextmanager
def scripted_v_acc(*values: int | None) -> Iterator[None]:
    """Replace V-acc of the evaluations of rounds 1, 2, … by these values in percent."""
    evaluate = Federation.evaluate

    def scripted(self: Federation) -> Evaluation:
        value = values[self.rounds_played - 1]
        validation = None if value is None else Evaluation((0,), (value,), (100,), 0.0)
        return replace(evaluate(self), validation=validation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "evaluate", scripted)
        yield


def run_with_v_acc(*values: int | None, **settings: Any) -> pfedlms.Run:
    with scripted_v_acc(*values):
        return pfedlms.run(method="fedavg", **{**SMALL, "rounds": len(values), **settings})


@pytest.mark.parametrize(
    ("patience", "values", "rounds", "best", "early"),
    [
        (1, [50, 49, 60, 60], 2, 1, True),
        (2, [50, 49, 60, 60, 60, 99], 5, 3, True),  # as high again is not higher
        (2, [50, 49, 51, 50, 52, 51], 6, 5, False),
        (2, [50, 40, 40], 3, 1, False),  # its last round
        (2, [50, None, 40, None, 40, 60], 5, 1, True),  # an evaluation without V-acc does not count
        (1, [None, None], 2, None, False),
        (0, [50, 40, 30, 20], 4, 1, None),
    ],
)
def test_a_run_stops_when_v_acc_no_longer_rises(
    patience: int, values: Sequence[int | None], rounds: int, best: int | None, early: bool | None
) -> None:
    result = run_with_v_acc(*values, patience=patience)
    summary, reached = result.summary, [record["p_acc"] for record in result.metrics]
    assert (summary["rounds"], summary["status"], len(reached)) == (rounds, "finished", rounds)
    assert summary.get("stopped_early") == early
    expected = best and {"round": best, "v_acc": values[best - 1], "p_acc": reached[best - 1]}
    assert summary["best"] == expected
    assert summary["everyone"]["accuracy"] == reached[-1]


def test_patience_counts_evaluations_and_not_rounds() -> None:
    result = run_with_v_acc(0, 50, 0, 40, 0, 40, 0, 60, patience=2, evaluate_every=2)
    assert [record["round"] for record in result.metrics] == [2, 4, 6]


@pytest.mark.parametrize(
    ("method", "on_disk", "participation"), [("sketchvote", False, 1.0), ("pfedlms", True, 1.0), ("pfedlms", True, 0.4)]
)
def test_the_models_of_the_best_round_equal_those_of_a_run_of_that_length(
    method: str, on_disk: bool, participation: float, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "method": method, "participation": participation}
    with scripted_v_acc(50, 90, 40, 30, 80):
        result = pfedlms.run(rounds=5, patience=3, out=tmp_path / "run" if on_disk else None, **settings)
    shorter, longer = (pfedlms.run(rounds=rounds, **settings) for rounds in (2, 5))
    assert same_models(result.best_models, shorter.models)
    assert same_models(result.models, longer.models)  # storing the best round did not change them
    assert not same_models(result.best_models, result.models)


def test_the_best_round_is_stored_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*paths: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(store.os, "link", no_link)
    run_with_v_acc(50, 90, 40, patience=9, out=tmp_path / "run")
    stored = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert stored["federation"]["rounds_played"] == 2


def test_a_damaged_best_checkpoint_is_named(tmp_path: Path) -> None:
    result = run_with_v_acc(50, 40, patience=9, out=tmp_path / "run")
    (tmp_path / "run" / "best.pt").write_bytes(b"no checkpoint")
    with pytest.raises(RunDirectoryError, match=r"best\.pt: cannot be read .*; delete it; the latest checkpoint is an"):
        _ = result.best_models


def test_the_models_of_the_best_round_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_with_v_acc(50, 60, 40, 70, 65, patience=5, out=tmp_path / "r")
    for name, best, expected in (("best.pt", ["--best"], whole.best_models), ("last.pt", [], whole.models)):
        assert main(["export", str(tmp_path / "r"), "--client", "1", *best, "-o", str(tmp_path / name)]) == 0
        assert same(torch.load(tmp_path / name, weights_only=True), expected[1])
    capsys.readouterr()
    assert main(["show", str(tmp_path / "r")]) == 0
    assert "V-acc was highest in round 4, 70.00 %; its models: pfedlms export --best" in capsys.readouterr().err
    (tmp_path / "r" / "best.pt").unlink()
    assert main(["export", str(tmp_path / "r"), "--global", "--best", "-o", "m.pt"]) == 2
    assert "no best round was kept; run with data.validation and train.patience" in capsys.readouterr().err


def assert_same_best(got: Path, expected: Path) -> None:
    """The runs are equal, also in the checkpoint of their best round."""
    assert_same_run(got, expected)
    stored = [torch.load(folder / "best.pt", weights_only=True)["federation"] for folder in (got, expected)]
    assert [state["rounds_played"] for state in stored] == [4, 4]
    assert torch.equal(stored[0]["params"], stored[1]["params"])


VALUES = (50, 60, 40, 70, 65, 65, 65, 99)


@pytest.mark.parametrize(("round", "every"), [(1, 3), (2, 1), (4, 3), (5, 1), (5, 3), (7, 3)])
def test_a_resumed_run_stops_in_the_same_round(round: int, every: int, tmp_path: Path) -> None:
    chosen = {**SMALL, "method": "fedavg", "rounds": 8, "patience": 3, "checkpoint_every": every}
    with scripted_v_acc(*VALUES):
        whole = pfedlms.run(out=tmp_path / "whole", **chosen)
        with pytest.raises(Crash):
            pfedlms.run(out=tmp_path / "crashed", callbacks=[CrashAt(round)], **chosen)
        resumed = pfedlms.resume(tmp_path / "crashed")
    assert whole.summary["rounds"] == resumed.summary["rounds"] == 7
    assert whole.summary["stopped_early"] is True
    assert_same_best(tmp_path / "crashed", tmp_path / "whole")


def test_a_run_killed_before_storing_its_best_round_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {**SMALL, "method": "fedavg", "rounds": 8, "patience": 3}
    with scripted_v_acc(*VALUES):
        pfedlms.run(out=tmp_path / "whole", **chosen)
        keep_best, calls = RunDirectory.keep_best, []

        def crash_the_third_time(self: RunDirectory) -> None:
            calls.append(1)
            if len(calls) == 3:  # for rounds 1, 2 and 4
                raise Crash
            keep_best(self)

        monkeypatch.setattr(RunDirectory, "keep_best", crash_the_third_time)
        with pytest.raises(Crash):
            pfedlms.run(out=tmp_path / "killed", **chosen)
        monkeypatch.setattr(RunDirectory, "keep_best", keep_best)
        state = torch.load(tmp_path / "killed" / "best.pt", weights_only=True)
        assert state["federation"]["rounds_played"] == 2
        pfedlms.resume(tmp_path / "killed")
    assert_same_best(tmp_path / "killed", tmp_path / "whole")


def test_resuming_a_run_that_stopped_early_changes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a copy of the folder, where a hard link becomes a file of its own."""
    run_with_v_acc(50, 60, 40, 30, 20, 10, patience=2, out=tmp_path / "r")
    out = Path(shutil.copytree(tmp_path / "r", tmp_path / "copy"))
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert main(["resume", str(out)]) == 0
    early = "stopped early after 4 rounds: V-acc was highest in round 2, 60.00 %; its models: pfedlms export --best"
    assert early in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_comparison_shows_that_runs_have_several_lengths(tmp_path: Path) -> None:
    with scripted_v_acc(50, 60, 40, 70):
        compared = pfedlms.compare(methods=["local", "fedavg"], seeds=1, rounds=4, patience=1, out=tmp_path, **SMALL)
    assert {run["rounds"] for run in compared.summaries} == {3}
    assert "up to 3 rounds" in str(compared)


def test_clients_out_of_sync_are_counted_also_after_a_resume(tmp_path: Path) -> None:
    play = Federation.play_round

    def with_clients_out_of_sync(self: Federation, evaluate_global: bool = False) -> RoundReport:
        report = play(self, evaluate_global)
        return replace(report, astray=2 if self.rounds_played == 3 else 0)

    chosen: dict[str, Any] = {**SMALL, "method": "sketchvote", "out": tmp_path / "r", "checkpoint_every": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "play_round", with_clients_out_of_sync)
        with pytest.raises(Crash):
            pfedlms.run(rounds=5, callbacks=[CrashAt(4)], **chosen)
        resumed = pfedlms.resume(tmp_path / "r")
    counted = [(each.get("astray"), each["rejected"]) for each in resumed.metrics]
    assert counted == [(None, 0), (None, 0), (2, 0), (2, 0), (2, 0)]
    assert (resumed.summary["astray"], resumed.summary["rejected"]) == (2, 0)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_uses_validation_samples(method: str) -> None:
    data = from_pool(*load_dataset("digits"), Partitioning(5, 0.5, 0, validation=0.3))
    aside = torch.from_numpy(np.concatenate(data.validation))
    other_x, other_y = data.x.clone(), data.y.clone()
    other_x[aside], other_y[aside] = 1e6, 9 - other_y[aside]
    runs = [federation(method, each) for each in (data, replace(data, x=other_x, y=other_y))]
    traffic = []
    for run in runs:
        run.start()
        traffic.append([run.play_round().traffic for _ in range(2)])
    assert traffic[0] == traffic[1]
    assert same_models(*([model for _, model in run.models()] for run in runs))
    ours, theirs = (run.evaluate() for run in runs)
    assert (ours.correct, ours.loss) == (theirs.correct, theirs.loss)
    assert ours.validation != theirs.validation


@pytest.mark.parametrize(("method", "participation"), [("pfedlms", 0.4), ("fedavg", 0.4), ("local", 1.0)])
def test_v_acc_and_p_acc_are_those_of_the_models(method: str, participation: float) -> None:
    result = pfedlms.run(method=method, rounds=4, participation=participation, **SMALL)
    data, models, last = result.federation.data, result.models, result.metrics[-1]
    participants = last.get("clients", range(5))
    assert len(participants) == round(5 * participation)
    assert last["v_acc"] == pytest.approx(accuracy_of_models(models, data, data.validation, participants))
    assert last["p_acc"] == pytest.approx(accuracy_of_models(models, data, data.test, participants))
    everyone = result.summary["everyone"]
    assert everyone["validation_accuracy"] == pytest.approx(accuracy_of_models(models, data, data.validation, range(5)))
    assert everyone["accuracy"] == pytest.approx(accuracy_of_models(models, data, data.test, range(5)))


def test_a_round_without_validation_samples_has_no_v_acc() -> None:
    """One of two clients holds a single training sample; a round with it alone has nothing to measure."""
    x, y = load_dataset("digits")
    pairs = [((x[k : k + n], y[k : k + n]), (x[k + 60 : k + 80], y[k + 60 : k + 80])) for k, n in ((0, 60), (100, 1))]
    settings = {"method": "local", "validation": 0.25, "participation": 0.5, "rounds": 8, "local_steps": 2}
    with pytest.warns(UserWarning, match="data.validation: 1 of 2 clients"):
        result = pfedlms.run(pairs, network, **settings)
    taken = {record["clients"][0]: record["v_acc"] for record in result.metrics}
    assert taken.keys() == {0, 1}
    assert all((record["v_acc"] is None) == (record["clients"] == [1]) for record in result.metrics)
    assert all(("V-acc" in evaluation_text(record)) == (record["v_acc"] is not None) for record in result.metrics)
    measured = [record["v_acc"] for record in result.metrics if record["v_acc"] is not None]
    assert result.summary["validation_accuracy"]["last10"] == pytest.approx(np.mean(measured))
    expected = accuracy_of_models(result.models, result.federation.data, result.federation.data.validation, [0])
    assert result.summary["everyone"]["validation_accuracy"] == pytest.approx(expected)


def test_without_validation_samples_no_v_acc_is_measured() -> None:
    result = pfedlms.run(method="local", **{**SMALL, "validation": 0.0, "rounds": 2})
    assert result.validation_accuracy is None
    assert not any(
        key.startswith(("v_", "validation")) for record in (*result.metrics, result.summary) for key in record
    )
