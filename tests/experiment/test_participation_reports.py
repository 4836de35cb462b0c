"""What is reported of runs where some of the clients take part or messages get lost; own metrics by name and digits,
titles, how samples were partitioned, and how to resume."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small import QUICK as SHORT
from small import SMALL as FOUR
from small import Pressing, X, Y, linear
from torch import Tensor, nn

import pfedlms
from pfedlms.cli import main
from pfedlms.errors import QuorumError, RunDirectoryError
from pfedlms.report.figures import accuracy_curves, by_setting
from pfedlms.report.results import comparison

SMALL = {**FOUR, "rounds": 4, "clients": 5}
PARAMETERS = 64 * 12 + 12 + 12 * 10 + 10
FRAME = 40


def options(**settings: Any) -> list[str]:
    chosen = {"train.rounds": 4, "data.clients": 5, "model.hidden": 12, "run.threads": 1, **settings}
    return [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "obda", "local"])
def test_metrics_are_of_those_who_took_part(method: str, tmp_path: Path) -> None:
    """Two of five, named beside their accuracies; `everyone` is over all of them and in no mean."""
    result = pfedlms.run(method=method, participation=0.4, out=tmp_path / "run", **SMALL)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tested = [len(held) for held in result.federation.data.test]
    for record in records:
        assert len(record["clients"]) == len(record["client_acc"]) == 2
        assert record["clients"] == sorted(set(record["clients"]))
        sizes = [tested[client] for client in record["clients"]]
        right = sum(size * own / 100 for size, own in zip(sizes, record["client_acc"], strict=True))
        assert record["p_acc"] == pytest.approx(100 * right / sum(sizes))
        assert "unheard" not in record
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["participation"] == 0.4
    assert summary["accuracy"]["max"] == max(record["p_acc"] for record in records)
    everyone = summary["everyone"]
    assert len(everyone["client_acc"]) == 5
    right = sum(size * own / 100 for size, own in zip(tested, everyone["client_acc"], strict=True))
    assert everyone["accuracy"] == pytest.approx(100 * right / sum(tested))


def test_answers_that_were_lost_are_counted_where_they_can_be(tmp_path: Path) -> None:
    result = pfedlms.run(method="fedavg", lost=0.3, quorum=0, seed=1, out=tmp_path / "run", **SMALL)
    assert [record["unheard"] for record in result.metrics] == sorted(record["unheard"] for record in result.metrics)
    assert result.summary["unheard"] == result.metrics[-1]["unheard"] > 0


def test_a_run_that_losses_have_stopped_goes_on_with_fewer_of_them(tmp_path: Path) -> None:
    """Who loses what is drawn by name, so the same round would fail again."""
    chosen = {**SMALL, "clients": 6, "participation": 0.5, "rounds": 40, "checkpoint_every": 1}
    told = r"round \d+: .*; lower run\.lost or run\.quorum \(to go on, in the run's config\.toml\), or let more clients"
    with pytest.raises(QuorumError, match=told):
        pfedlms.run(method="fedavg", lost=0.5, quorum=0, out=tmp_path / "run", **chosen)
    with pytest.raises(QuorumError, match=told):
        pfedlms.resume(tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("lost = 0.5", "lost = 0.01"))
    assert pfedlms.resume(tmp_path / "run").summary["rounds"] == 40


@pytest.mark.parametrize(
    ("chosen", "catches_up"),
    [
        ({"method.name": "zsign", "method.downlink": "sum"}, True),
        ({"method.name": "zsign", "method.downlink": "model"}, False),
        ({"method.name": "fedavg"}, False),
    ],
)
def test_a_dry_run_says_who_takes_part_and_what_it_cannot_say(
    chosen: dict[str, str], catches_up: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--dry-run", *options(**{"train.participation": 0.4, **chosen})]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 clients, 2 of them in a round" in shown
    assert ("receive to catch up, which depends on the clients that are drawn" in shown) is catches_up
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["participants"], plan["catches_up"]) == (2, catches_up)
    if chosen["method.name"] == "fedavg":
        assert plan["bytes_per_round"]["up_payload"] == 2 * 4 * PARAMETERS
        assert plan["total_bytes"] == 4 * 2 * 2 * (4 * PARAMETERS + FRAME)
    assert main(["run", "--dry-run", "--json", *options(**chosen)]) == 0
    assert not json.loads(capsys.readouterr().out)["catches_up"]


def test_bits_of_a_round_are_those_of_participants(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for share in ("1", "0.25"):
        assert main(["bits", "--method", "fedavg", "--set", f"train.participation={share}", "--json"]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    assert [row["participants"] for row in rows] == [20, 5]
    assert rows[0]["up_payload_bits"] == rows[1]["up_payload_bits"]  # one client's
    assert rows[0]["mib_per_round"] == 4 * rows[1]["mib_per_round"]
    assert main(["bits", "--set", "train.participation=0.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = [line.split()[0].rstrip(",") for line in lines if re.search(r" \+ *$", line)]
    tracking = "zsign obcsaa obda stc sketchvote sketchmean fetchsgd sparseloco decomfl"
    assert set(marked) == set(tracking.split())


# --- metrics of one's own, titles, and how to resume ---

QUICK: dict[str, Any] = {**SHORT, "clients": 2}


def thousandth(outputs: Tensor, targets: Tensor, unit: float = 1e-3) -> Tensor:
    return unit * (outputs.argmax(dim=1) == targets).float()


def words(shown: Any) -> str:
    return " ".join(str(shown).split())


@pytest.mark.parametrize(
    ("metric", "name"),
    [
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
    """Also where a shell takes the folder only in quotes."""
    out = tmp_path / "my run"
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.run(*given, method="fedavg", out=out, callbacks=[Pressing(1)], **QUICK)
    expected = ", ".join([repr(str(out)), *([call] if call else [])])
    assert str(caught.value) == f"interrupted; resume with pfedlms.resume({expected})"
    assert main(["show", str(out)]) == 0
    told = f"pfedlms.resume({expected})" if call else f"pfedlms resume '{out}'"
    assert capsys.readouterr().err == f"after 1 rounds; not finished. Resume with: {told}\n"
    with pytest.raises(RunDirectoryError, match=re.escape(f"holds a run already; resume it by `{told}`")):
        pfedlms.run(*given, method="fedavg", out=out, **QUICK)


def test_plots_have_a_title(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    plot = ["--plot", str(tmp_path / "p.svg")]
    chosen = ["--clients", "3", "--rounds", "2", "--set", "model.hidden=8", "--set", "run.threads=1", "--quiet"]
    compare = ["compare", "--methods", "local", "--seeds", "1", "--partition", "iid", "--out", str(tmp_path / "c")]
    assert main([*compare, *chosen, *plot]) == 0
    assert "3 clients, partition iid · 2 rounds" in (tmp_path / "p.svg").read_text()
    sweep = ["sweep", "--method", "local", "--learning-rate", ".1,.2", "--alpha", "0.3", "--out", str(tmp_path / "s")]
    assert main([*sweep, "--validation", "0.2", *chosen, *plot]) == 0
    assert "local · digits · dnn, 610 parameters · 3 clients, α = 0.3" in (tmp_path / "p.svg").read_text()
