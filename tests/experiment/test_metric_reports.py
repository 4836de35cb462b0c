"""What is said of runs: own metrics by name and digits, titles, how samples were partitioned, how to resume."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import Pressing
from torch import Tensor, nn

import pfedlms
from pfedlms.cli import main
from pfedlms.errors import UsageError
from pfedlms.report.figures import accuracy_curves, by_setting
from pfedlms.report.results import comparison

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(80, 4)).astype(np.float32), np.arange(80) % 2
QUICK: dict[str, Any] = {"rounds": 2, "clients": 2, "local_steps": 1, "batch_size": 8, "threads": 1}


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def thousandth(outputs: Tensor, targets: Tensor, unit: float = 1e-3) -> Tensor:
    return unit * (outputs.argmax(dim=1) == targets).float()


def words(shown: Any) -> str:
    return " ".join(str(shown).split())


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (thousandth, "thousandth"),
        (lambda o, t: thousandth(o, t), "metric"),
        (("hits a thousand", lambda o, t: thousandth(o, t)), "hits a thousand"),
        (partial(thousandth, unit=1e-3), "thousandth"),
    ],
)
def test_a_metric_has_its_name_and_four_digits(metric: Any, name: str) -> None:
    both = pfedlms.compare((X, Y), linear, methods="local,fedavg", seeds=1, metric=metric, **QUICK)
    assert {run["metric"] for run in both.summaries} == {name}
    assert f"{name}, the higher the better" in words(both)
    reached = both.summaries[1]["accuracy"]["max"]
    assert 0 < reached < 1e-3
    assert f"fedavg {reached:.4g} " in words(both)


def test_a_metric_that_is_none() -> None:
    for given in (("name", 3), 3):
        with pytest.raises(UsageError, match=r"metric: got 3, expected a function .*, or a pair \(name, function\)"):
            pfedlms.run((X, Y), linear, metric=given, **QUICK)  # type: ignore[arg-type]


def test_an_interrupted_sweep_has_the_columns_of_a_whole_one(tmp_path: Path) -> None:
    settings = {"method": "local", "learning_rate": [0.1, 0.2], "validation": 0.2, **QUICK}
    with pytest.raises(KeyboardInterrupt):
        pfedlms.sweep((X, Y), linear, out=tmp_path / "s", callbacks=[Pressing(1)], **settings)
    with open(tmp_path / "s" / "results.csv") as file:
        (row,) = csv.DictReader(file)
    assert (row["status"], row["train.learning_rate"]) == ("interrupted", "0.1")
    pfedlms.resume_study(tmp_path / "s", (X, Y), linear)
    with open(tmp_path / "s" / "results.csv") as file:
        assert [row["train.learning_rate"] for row in csv.DictReader(file)] == ["0.1", "0.2"]


def test_reprs_are_short_and_say_what_it_was(tmp_path: Path) -> None:
    result = pfedlms.run((X, Y), linear, method="fedavg", out=tmp_path / "r", **QUICK)
    said = f"fedavg on custom, 2 clients, 2 rounds: P-acc {result.accuracy:.2f} %, mean of the last 2"
    assert repr(result) == f"Run({said}, in {tmp_path / 'r'})"
    own = pfedlms.run((X, Y), linear, method="fedavg", metric=thousandth, **{**QUICK, "rounds": 1})
    assert repr(own) == f"Run(fedavg on custom, 2 clients, 1 round: thousandth {own.accuracy:.4g})"
    both = pfedlms.compare((X, Y), linear, methods="local,fedavg", seeds=1, **QUICK)
    assert repr(both) == "Study(2 runs)"
    assert repr(both.runs[1]) == f"Run({said})"


@pytest.mark.parametrize(
    ("metric", "label", "digits"), [(thousandth, "thousandth (V-acc)", ".4g"), (None, "V-acc, %", ".2f")]
)
def test_figures_call_a_metric_by_its_name(metric: Any, label: str, digits: str) -> None:
    both = pfedlms.compare((X, Y), linear, methods="local,fedavg", seeds=2, metric=metric, **QUICK)
    settings = {"validation": 0.2, "learning_rate": [0.1, 0.2], "momentum": [0.0, 0.5], "method": "local", **QUICK}
    done = pfedlms.sweep((X, Y), linear, metric=metric, **settings)
    drawn, swept = accuracy_curves(both.runs, against="bytes"), by_setting(done.section())
    assert drawn is not None
    assert swept is not None
    assert label.replace("V-acc", "P-acc") in str(drawn.chart.to_dict())
    assert swept.title == f"{label} by train.learning_rate"
    best = done.best()
    assert best is not None
    assert f"{best['score']:{digits}}" in str(swept.chart.to_dict())


@pytest.mark.parametrize(
    ("data", "settings", "scheme", "told"),
    [
        ([(X[:40], Y[:40]), (X[40:], Y[40:])], {}, "given", "2 clients, partition given ·"),
        ((X, Y), {"clients": 3, "alpha": 0.4}, "dirichlet", "3 clients, α = 0.4 ·"),
        ((X, Y), {"clients": 3, "partition": "iid"}, "iid", "3 clients, partition iid ·"),
        ((X, Y), {"clients": 3, "partition": "quantity"}, "quantity", "3 clients, partition quantity, α = 0.5 ·"),
    ],
)
def test_alpha_is_told_where_it_was_used(data: Any, settings: dict[str, Any], scheme: str, told: str) -> None:
    result = pfedlms.run(data, linear, method="fedavg", **{**QUICK, "min_samples": 2, **settings})
    assert result.summary["partition"] == scheme
    assert told in comparison([result]).title


@pytest.mark.parametrize(
    ("given", "call"),
    [
        ((None, None), None),
        (((X, Y), linear), "data, model"),
        ((None, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), "model=model"),
    ],
)
def test_an_interrupted_run_names_all_that_goes_on_with_it(
    given: tuple[Any, Any], call: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.run(*given, method="fedavg", out=tmp_path / "r", callbacks=[Pressing(1)], **QUICK)
    expected = ", ".join([repr(str(tmp_path / "r")), *([call] if call else [])])
    assert str(caught.value) == f"interrupted; resume with pfedlms.resume({expected})"
    assert main(["show", str(tmp_path / "r")]) == 0
    told = f"pfedlms.resume({expected})" if call else f"pfedlms resume {tmp_path / 'r'}"
    assert capsys.readouterr().err == f"after 1 rounds; not finished. Resume with: {told}\n"


def test_plots_have_a_title(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    plot = ["--plot", str(tmp_path / "p.svg")]
    options = ["--clients", "3", "--rounds", "2", "--set", "model.hidden=8", "--set", "run.threads=1", "--quiet"]
    compare = ["compare", "--methods", "local", "--seeds", "1", "--partition", "iid", "--out", str(tmp_path / "c")]
    assert main([*compare, *options, *plot]) == 0
    assert "3 clients, partition iid · 2 rounds" in (tmp_path / "p.svg").read_text()
    sweep = ["sweep", "--method", "local", "--learning-rate", ".1,.2", "--alpha", "0.3", "--out", str(tmp_path / "s")]
    assert main([*sweep, "--validation", "0.2", *options, *plot]) == 0
    assert "local · digits · dnn, 610 parameters · 3 clients, α = 0.3" in (tmp_path / "p.svg").read_text()
