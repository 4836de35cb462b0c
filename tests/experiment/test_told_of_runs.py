"""What is said of runs: how samples were dealt out, what goes on with them, and only columns that say something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import Pressing
from torch import nn

import pfedlms
from pfedlms.cli import main
from pfedlms.cli.folders import sections_of
from pfedlms.report.page import about

X = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
Y = np.arange(120) % 3
SMALL: dict[str, Any] = {
    "rounds": 3, "local_steps": 1, "batch_size": 8, "threads": 1, "progress": False, "method": "fedavg",
    "min_samples": 2,
}  # fmt: skip
OPTIONS = ["--clients", "3", "--rounds", "2", "--set", "model.hidden=8", "--set", "run.threads=1", "--quiet"]


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


# --- how samples were dealt out ---

CLIENTS = [(X[:40], Y[:40]), (X[40:], Y[40:])]


@pytest.mark.parametrize(
    ("data", "settings", "scheme", "told"),
    [
        (CLIENTS, {}, "given", "2 clients, partition given ·"),
        ((X, Y), {"clients": 3, "alpha": 0.4}, "dirichlet", "3 clients, α = 0.4 ·"),
        ((X, Y), {"clients": 3, "partition": "iid"}, "iid", "3 clients, partition iid ·"),
        ((X, Y), {"clients": 3, "partition": "quantity"}, "quantity", "3 clients, partition quantity, α = 0.5 ·"),
    ],
)
def test_alpha_is_told_where_it_was_used(
    data: Any, settings: dict[str, Any], scheme: str, told: str, tmp_path: Path
) -> None:
    result = pfedlms.run(data, linear, out=tmp_path / "r", **SMALL, **settings)
    assert result.summary["partition"] == scheme
    assert told in about(sections_of([tmp_path / "r"])[0][0])


@pytest.mark.parametrize(("scheme", "told"), [("iid", "partition iid"), ("dirichlet", "α = 0.5")])
def test_a_plan_names_alpha_where_it_counts(scheme: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [each for each in OPTIONS if each != "--quiet"]
    assert main(["run", "--partition", scheme, "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert f"3 clients, {told}, " in shown
    assert ("α" in shown) == ("α" in told)


# --- what goes on ---


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
        pfedlms.run(*given, out=tmp_path / "r", clients=3, callbacks=[Pressing(2)], **SMALL)
    expected = ", ".join([repr(str(tmp_path / "r")), *([call] if call else [])])
    assert str(caught.value) == f"interrupted; resume with pfedlms.resume({expected})"
    assert main(["show", str(tmp_path / "r")]) == 0
    told = f"pfedlms.resume({expected})" if call else f"pfedlms resume {tmp_path / 'r'}"
    assert capsys.readouterr().err == f"after 2 rounds; not finished. Resume with: {told}\n"


def test_plots_have_a_title(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    plot = ["--plot", str(tmp_path / "p.svg")]
    compare = ["compare", "--methods", "local", "--seeds", "1", "--partition", "iid", "--out", str(tmp_path / "c")]
    assert main([*compare, *OPTIONS, *plot]) == 0
    assert "digits · 3 clients, partition iid" in (tmp_path / "p.svg").read_text()
    sweep = ["sweep", "--method", "local", "--learning-rate", ".1,.2", "--alpha", "0.3", "--out", str(tmp_path / "s")]
    assert main([*sweep, "--validation", "0.2", *OPTIONS, *plot]) == 0
    assert "local on digits · 3 clients, α = 0.3" in (tmp_path / "p.svg").read_text()
