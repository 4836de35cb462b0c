"""Mistyped options are answered by what was meant, and tables fit a screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from studies import section_of

from pfedlms.cli import main
from pfedlms.report.results import comparison

OPTIONS = ["--clients", "4", "--local-steps", "2", "--batch-size", "8", "--set", "model.hidden=12"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--client", "5"], "did you mean --clients?"),
        (["run", "--lr", "0.1"], "did you mean --learning-rate?"),
        (["sweep", "--epochs", "5"], "did you mean --local-epochs?"),
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
    """The methods of `pfedlms compare` and a variant; in a pipe all columns are there."""
    methods = "local,fedavg,pfedlms,sketchvote,pfedlms:thresholds=1:ratio=0.2"
    command = ["compare", "--methods", methods, "--seeds", "2", "--rounds", "1", *OPTIONS, *extra, "--quiet"]
    assert main([*command, "--out", str(tmp_path / "c")]) == 0
    piped = capsys.readouterr().out
    assert all(head in piped for head in ("MiB total", "rounds", "seeds", "thresholds=1"))
    lines = str(comparison(section_of(tmp_path / "c").runs)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("thresholds=1" in line for line in lines)
