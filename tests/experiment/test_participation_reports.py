"""Reports of runs with partial participation or dropouts, of custom metrics and of partitions; and how messages tell
users to resume."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import OPTIONS, SendSignal, X, Y, edit_config, linear
from small import QUICK as SHORT
from small import SMALL as SMALL_SETTINGS
from torch import Tensor, nn

import pfedlms
from pfedlms.cli import main
from pfedlms.errors import QuorumError, RunDirectoryError
from pfedlms.report.figures import accuracy_curves, by_setting
from pfedlms.report.results import comparison

SMALL = {**SMALL_SETTINGS, "rounds": 4, "clients": 5}
PARAMETERS = 64 * 12 + 12 + 12 * 10 + 10
FRAME = 40


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "obda"])
def test_metrics_are_of_the_participants(method: str) -> None:
    """Two of five clients, listed with their accuracies; `everyone` is over all clients and part of no mean."""
    result = pfedlms.run(method=method, participation=0.4, **SMALL)
    tested = [len(held) for held in result.federation.data.test]
    for record in result.metrics:
        assert len(record["clients"]) == len(record["client_acc"]) == 2
        assert record["clients"] == sorted(set(record["clients"]))
        sizes = [tested[client] for client in record["clients"]]
        assert record["p_acc"] == pytest.approx(np.average(record["client_acc"], weights=sizes))
        assert "unheard" not in record
    assert result.summary["participation"] == 0.4
    assert result.summary["accuracy"]["max"] == max(record["p_acc"] for record in result.metrics)
    everyone = result.summary["everyone"]
    assert everyone["accuracy"] == pytest.approx(np.average(everyone["client_acc"], weights=tested))


def test_lost_answers_are_counted() -> None:
    result = pfedlms.run(method="fedavg", lost=0.3, quorum=0, seed=1, **SMALL)
    assert [record["unheard"] for record in result.metrics] == sorted(record["unheard"] for record in result.metrics)
    assert result.summary["unheard"] == result.metrics[-1]["unheard"] > 0


def test_a_run_stopped_by_its_quorum_resumes_with_fewer_dropouts(tmp_path: Path) -> None:
    """Dropouts are drawn from the seed, so the same round would fail again."""
    chosen = {**SMALL, "clients": 6, "participation": 0.5, "rounds": 40, "checkpoint_every": 1}
    message = (
        r"round \d+: .*; lower run\.lost or run\.quorum \(to go on, in the run's config\.toml\), or let more clients"
    )
    with pytest.raises(QuorumError, match=message):
        pfedlms.run(method="fedavg", lost=0.5, quorum=0, out=tmp_path / "run", **chosen)
    with pytest.raises(QuorumError, match=message):
        pfedlms.resume(tmp_path / "run")
    edit_config(tmp_path / "run", "lost = 0.5", "lost = 0.01")
    assert pfedlms.resume(tmp_path / "run").summary["rounds"] == 40


@pytest.mark.parametrize(
    ("chosen", "catches_up"), [(["zsign", "--set", "method.downlink=sum"], True), (["fedavg"], False)]
)
def test_a_dry_run_counts_participants_and_names_unknown_catch_up_bytes(
    chosen: list[str], catches_up: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--dry-run", *OPTIONS, "--clients", "5", "--method", *chosen]
    partial_run = [*arguments, "--participation", "0.4"]
    assert main(partial_run) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "5 clients, 2 of them in a round" in shown
    assert ("receive to catch up, which depends on the clients that are drawn" in shown) is catches_up
    assert main([*partial_run, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["participants"], plan["catches_up"]) == (2, catches_up)
    if chosen == ["fedavg"]:
        assert plan["bytes_per_round"]["up_payload"] == 2 * 4 * PARAMETERS
        assert plan["total_bytes"] == 3 * 2 * 2 * (4 * PARAMETERS + FRAME)
    assert main([*arguments, "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["catches_up"]


def test_bits_count_the_participants_of_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for share in ("1", "0.25"):
        assert main(["bits", "--method", "fedavg", "--set", f"train.participation={share}", "--json"]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    assert [row["participants"] for row in rows] == [20, 5]
    assert rows[0]["up_payload_bits"] == rows[1]["up_payload_bits"]  # one client's
    assert rows[0]["mib_per_round"] == 4 * rows[1]["mib_per_round"]
    assert main(["bits", "--set", "train.participation=0.25"]) == 0
    marked = re.findall(r"^ *(\w+).* \+ *$", capsys.readouterr().out, re.MULTILINE)
    tracking = "zsign obcsaa obda stc sketchvote sketchmean fetchsgd sparseloco decomfl"
    assert set(marked) == set(tracking.split())


QUICK: dict[str, Any] = {**SHORT, "clients": 2}


def thousandth(outputs: Tensor, targets: Tensor, unit: float = 1e-3) -> Tensor:
    return unit * (outputs.argmax(dim=1) == targets).float()


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (lambda o, t: thousandth(o, t), "metric"),
        (("hits a thousand", thousandth), "hits a thousand"),
        (partial(thousandth, unit=1e-3), "thousandth"),
    ],
)
def test_a_metric_is_reported_by_its_name(metric: Any, name: str) -> None:
    assert pfedlms.run((X, Y), linear, method="local", metric=metric, **QUICK).summary["metric"] == name


def test_reprs_describe_the_run(tmp_path: Path) -> None:
    result = pfedlms.run((X, Y), linear, method="fedavg", out=tmp_path / "r", **QUICK)
    text = f"fedavg on custom, 2 clients, 2 rounds: P-acc {result.accuracy:.2f} %, mean of the last 2"
    assert repr(result) == f"Run({text}, in {tmp_path / 'r'})"
    own = pfedlms.run((X, Y), linear, method="fedavg", metric=thousandth, **{**QUICK, "rounds": 1})
    assert repr(own) == f"Run(fedavg on custom, 2 clients, 1 round: thousandth {own.accuracy:.4g})"
    both = pfedlms.compare((X, Y), linear, methods="local,fedavg", seeds=1, **QUICK)
    assert repr(both) == "Study(2 runs)"


def test_figures_name_a_custom_metric() -> None:
    both = pfedlms.compare((X, Y), linear, methods="local,fedavg", seeds=2, metric=thousandth, **QUICK)
    settings = {"validation": 0.2, "learning_rate": [0.1, 0.2], "momentum": [0.0, 0.5], "method": "local", **QUICK}
    done = pfedlms.sweep((X, Y), linear, metric=thousandth, **settings)
    curves, swept, best = accuracy_curves(both.runs, against="bytes"), by_setting(done.section()), done.best()
    assert "thousandth (P-acc)" in str(curves.chart.to_dict())
    assert swept.title == "thousandth (V-acc) by train.learning_rate"
    assert f"{best['score']:.4g}" in str(swept.chart.to_dict())


@pytest.mark.parametrize(
    ("data", "settings", "scheme", "title"),
    [
        ([(X[:40], Y[:40]), (X[40:], Y[40:])], {}, "given", "2 clients, partition given ·"),
        ((X, Y), {"alpha": 0.4, "min_samples": 2}, "dirichlet", "2 clients, α = 0.4 ·"),
        ((X, Y), {"partition": "quantity", "min_samples": 2}, "quantity", "2 clients, partition quantity, α = 0.5 ·"),
    ],
)
def test_titles_have_alpha_only_if_it_was_used(data: Any, settings: dict[str, Any], scheme: str, title: str) -> None:
    result = pfedlms.run(data, linear, method="fedavg", **{**QUICK, **settings})
    assert result.summary["partition"] == scheme
    assert title in comparison([result]).title


@pytest.mark.parametrize(
    ("given", "call"),
    [
        ((None, None), None),
        (((X, Y), linear), "data, model"),
        ((None, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), "model=model"),
    ],
)
def test_messages_name_everything_that_is_needed_to_resume(
    given: tuple[Any, Any], call: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for a folder whose name needs quotes in a shell."""
    out = tmp_path / "my run"
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.run(*given, method="fedavg", out=out, callbacks=[SendSignal(1)], **QUICK)
    expected = ", ".join([repr(str(out)), *([call] if call else [])])
    assert str(caught.value) == f"interrupted; resume with pfedlms.resume({expected})"
    assert main(["show", str(out)]) == 0
    command = f"pfedlms.resume({expected})" if call else f"pfedlms resume '{out}'"
    assert capsys.readouterr().err == f"after 1 round; not finished. Resume with: {command}\n"
    with pytest.raises(RunDirectoryError, match=r"holds a run already; resume it by `pfedlms resume '.*my run'`"):
        pfedlms.run(*given, method="fedavg", out=out, **QUICK)
