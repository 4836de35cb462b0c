"""Mistyped options are answered by what was meant, and tables fit a screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pfedlms
from pfedlms.cli import main
from pfedlms.report.tables import comparison_text, fitted

OPTIONS = ["--clients", "4", "--local-steps", "2", "--batch-size", "8", "--set", "model.hidden=12"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--client", "5"], "did you mean --clients?"),
        (["run", "--lr", "0.1"], "did you mean --learning-rate?"),
        (["compare", "--lr=0.1"], "did you mean --learning-rate?"),
        (["sweep", "--epochs", "5"], "did you mean --local-steps?"),
        (["run", "--num_clients", "5"], "did you mean --clients?"),
        (["run", "--fraction", "0.1"], "did you mean --participation?"),
        (["run", "--methods", "fedavg"], "did you mean --method?"),
        (["compare", "--method", "fedavg"], "did you mean --methods?"),
        (["compare", "--seed-count", "3"], "did you mean --seed"),
        (["run", "--seeds", "3"], "did you mean --seed?"),
        (["export", "r", "--clients", "3"], "did you mean --client?"),
        (["run", "--momentum", "0.9"], "did you mean --set train.momentum=…?"),
        (["run", "--thresholds", "3"], "did you mean --set method.thresholds=…?"),
        (["run", "--leraning-rate", "3"], "did you mean --learning-rate"),
        (["resume", "r", "--dry-run"], "it is an option of run"),
    ],
)
def test_a_mistyped_option_is_answered_by_what_was_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_options_stand_for_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "--clients": ("data", "clients", 7), "--alpha": ("data", "alpha", 0.3), "--model": ("model", "name", "dnn"),
        "--validation": ("data", "validation", 0.1), "--participation": ("train", "participation", 0.5),
        "--learning-rate": ("train", "learning_rate", 0.03), "--rounds": ("train", "rounds", 9),
        "--local-steps": ("train", "local_steps", 3), "--batch-size": ("train", "batch_size", 5),
    }  # fmt: skip
    options = [part for option, (_, _, value) in given.items() for part in (option, str(value))]
    assert main(["run", "--dry-run", "--json", *options]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    for section, key, value in given.values():
        assert config[section][key] == value


@pytest.mark.parametrize("extra", [[], ["--participation", "0.5"], ["--validation", "0.2"]])
def test_the_table_of_a_comparison_fits_a_screen(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The methods of `pfedlms compare` and a variant, also in a file, where the screen is wide."""
    methods = "local,fedavg,pfedlms,sketchvote,pfedlms:thresholds=1:ratio=0.2"
    command = ["compare", "--methods", methods, "--seeds", "2", "--rounds", "1", *OPTIONS, *extra, "--quiet"]
    assert main([*command, "--out", str(tmp_path / "c")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("thresholds=1" in line for line in lines)


def summary(**values: Any) -> dict[str, Any]:
    sent = dict.fromkeys(("up_payload", "up_framing", "down_payload", "down_framing", "catch_up"), 0)
    return {
        "method": "local", "dataset": "digits", "model": "dnn", "seed": 0, "clients": 20, "rounds": 3,
        "status": "finished", "participation": 1.0, "parameters": 10, "seconds": 1.0, "everyone": None,
        "accuracy": {"max": 90.0, "last10": 80.0, "final": 70.0}, "bytes_per_round": sent, **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("evaluations", "head", "caption"),
    [
        (1, "last 1", "mean of the one evaluation."),
        (5, "last 5", "mean of all 5 evaluations."),
        (10, "last 10", "mean of the last 10 of 10 evaluations."),
        (19, "last 10", "mean of the last 10 of 19 evaluations."),
        (20, "last 10", "mean of the last 10 evaluations."),
        (None, "last 10", "mean of the last 10 evaluations."),
    ],
)
def test_the_last_10_say_over_how_many_they_are(evaluations: int | None, head: str, caption: str) -> None:
    known = {} if evaluations is None else {"evaluations": evaluations}
    text = comparison_text([summary(**known)])
    assert f" {head} " in text.splitlines()[2]
    assert caption in " ".join(text.split())


def test_a_summary_counts_its_evaluations() -> None:
    small = {"clients": 4, "hidden": 12, "local_steps": 1, "batch_size": 8, "threads": 1}
    assert pfedlms.run(method="local", rounds=5, evaluate_every=2, **small).summary["evaluations"] == 3


def test_names_are_broken_only_where_there_is_no_room() -> None:
    columns, cells = ["method", *"abc"], ["10.00 ± 1.00"] * 3
    assert fitted(columns, [["fedavg", *cells]]) == (columns, [["fedavg", *cells]], 1)
    tight = ["10.00±1.00"] * 3
    long = "pfedlms:thresholds=1:ratio=0.2:strength=0.05"
    assert fitted(columns, [[long, *cells]]) == (columns, [[long, *tight]], 0)
    longer = f"{long}:smoothing=0.25"
    broken = "pfedlms\n thresholds=1\n ratio=0.2\n strength=0.05\n smoothing=0.25"
    assert fitted(columns, [[longer, *cells]], optional=["b"]) == (columns, [[broken, *tight]], 0)
    wide = [longer, "10.00 ± 1.00" * 3, "20.00 ± 2.00" * 3, "1"]
    assert fitted(columns, [wide], optional=["b", "a"]) == (
        ["method", "a", "c"], [[broken, "10.00±1.00" * 3, "1"]], 0,
    )  # fmt: skip
