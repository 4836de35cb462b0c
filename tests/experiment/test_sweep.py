"""Sweeps: every combination, scored as by hand, the best, its edges, and going on after an interruption."""

from __future__ import annotations

import csv
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from small import OPTIONS, SMALL, Pressing

import pfedlms
from pfedlms.cli import main


def test_an_edge_is_told_for_three_numbers_or_more() -> None:
    """The middle of three rates is best by far; of two, one always lies at an end."""
    with pytest.warns(UserWarning, match=r"the best train\.learning_rate is 0\.2, the largest tried; try larger"):
        pfedlms.sweep(method="local", learning_rate=[1e-5, 1e-4, 0.2], validation=0.2, **SMALL)
    with pytest.warns(UserWarning, match=r"chosen by p_acc on test samples.*data\.validation"):
        assert pfedlms.sweep(method="local", learning_rate=np.array([0.1, 0.2]), **SMALL).by == "p_acc"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pfedlms.sweep(method="local", learning_rate=[1e-5, 0.2], validation=0.2, **SMALL)
        pfedlms.sweep(method="local", learning_rate=[1e-5, 0.2, 400.0], validation=0.2, **SMALL)
        pfedlms.sweep(method="zsign", downlink=["model", "sum"], validation=0.2, **SMALL)


def test_there_is_no_edge_where_a_setting_ends() -> None:
    """No decay is better than absurd ones, and to say all better than to say little; nothing lies beyond."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = {**SMALL, "rounds": 8, "learning_rate": 0.3, "validation": 0.2}
        decays = pfedlms.sweep(method="local", weight_decay=[3.0, 0.0, 2.0], **settings)
        ratios = pfedlms.sweep(method="sketchvote", ratio=[1.0, 0.01, 0.02], **settings)
    assert decays.best()["settings"] == {"train.weight_decay": 0.0}
    assert ratios.best()["settings"] == {"method.ratio": 1.0}
    with pytest.warns(UserWarning, match=r"weight_decay is 0\.001, the smallest tried; try smaller"):
        pfedlms.sweep(method="local", weight_decay=[3.0, 0.001, 2.0], **settings)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    out, picture = tmp_path / "s", tmp_path / "s.svg"
    command = ["sweep", "--method", "pfedlms", "--set", "method.ratio=.2,.3", "--set", "pfedlms.thresholds=1,3",
               "--learning-rate", ".001,.1", "--validation", ".2", *OPTIONS, "--out", str(out)]  # fmt: skip
    assert main([*command, "--plot", str(picture), "--quiet"]) == 0
    shown = capsys.readouterr()
    rows = [line for line in shown.out.splitlines() if re.match(r" ratio=0\.[23] thresholds=[13] ", line)]
    assert len(rows) == 8
    assert sum("best" in row for row in rows) == 1
    assert "pfedlms · digits · dnn, 910 parameters · 4 clients, α = 0.5" in picture.read_text()
    assert main(["resume", str(out), "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    axes = {"method.ratio": [0.2, 0.3], "method.thresholds": [1, 3], "train.learning_rate": [0.001, 0.1]}
    assert (document["axes"], document["by"]) == (axes, "v_acc")
    assert f"best by v_acc: {document['best']['name']}" in shown.err
    stored = json.loads((out / "results.json").read_text())
    assert [set(row["settings"]) for row in stored["runs"]] == [set(axes)] * 8
    scores = [row["validation_accuracy"]["last10"] for row in stored["runs"]]
    assert document["best"]["score"] == max(scores)
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out == shown.out
    assert main([*command, "--rounds", "9"]) == 2
    assert f"{out}: holds runs already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.learning_rate=.1,x"], "train.learning_rate: got 'x', expected a number"),
        (["--method", "local,fedavg", "--learning-rate", ".1,.2"], "a sweep is of one method"),
        (["--learning-rate", ".1,.2", "--by", "v_acc"], "--by: got v_acc, but data.validation is 0"),
    ],
)
def test_wrong_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    options = {"method": "local", "learning_rate": [0.01, 0.2, 400.0], "validation": 0.2, **SMALL}
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.sweep(out=tmp_path / "s", callbacks=[Pressing(2, of="learning_rate=0.2 seed 0")], **options)
    stopped = caught.value.result  # type: ignore[attr-defined]
    assert stopped.interrupted
    assert [run["rounds"] for run in stopped.summaries] == [3, 2]
    with open(tmp_path / "s" / "results.csv") as file:
        rows = [(row["status"], row["train.learning_rate"]) for row in csv.DictReader(file)]
    assert rows == [("finished", "0.01"), ("interrupted", "0.2")]
    resumed = pfedlms.resume(tmp_path / "s")
    whole = pfedlms.sweep(**options)
    assert [cell["score"] for cell in resumed.cells()] == [cell["score"] for cell in whole.cells()]
    assert resumed.best()["name"] == whole.best()["name"]
