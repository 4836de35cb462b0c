"""What is said of runs: how samples were dealt out, what goes on with them, and only columns that say something."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import nn

import pfedlms
from pfedlms.cli import main
from pfedlms.experiment.config import load_config
from pfedlms.report.page.document import about
from pfedlms.report.page.gather import gather
from pfedlms.report.tables import comparison_text, dealt_by, set_up, table

X = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
Y = np.arange(120) % 3
SMALL: dict[str, Any] = {
    "rounds": 3, "local_steps": 1, "batch_size": 8, "threads": 1, "progress": False, "method": "fedavg",
    "min_samples": 2,
}  # fmt: skip
OPTIONS = ["--clients", "3", "--rounds", "2", "--set", "model.hidden=8", "--set", "run.threads=1", "--quiet"]


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


class Pressing(pfedlms.Callback):
    def on_round(self, run: Any, record: Any) -> None:
        if record["round"] == 2:
            signal.raise_signal(signal.SIGINT)


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
    assert told in about(gather([tmp_path / "r"]).parts[0])


def test_of_runs_that_do_not_tell() -> None:
    """As older ones: a data set by name was dealt out by α; nobody knows of others."""
    for dataset, partition, expected in (
        ("digits", "auto", "α = 0.5"), ("custom", "auto", ""), ("file:a.npz", "auto", ""),
        ("custom", "classes", "partition classes"),
    ):  # fmt: skip
        assert dealt_by({}, load_config(None, {"data": {"dataset": dataset, "partition": partition}}).data) == expected


def test_a_finished_run_that_does_not_tell_stays_as_it_is(tmp_path: Path) -> None:
    pfedlms.run((X, Y), linear, out=tmp_path, clients=3, **SMALL)
    file = tmp_path / "summary.json"
    summary = json.loads(file.read_text())
    del summary["partition"]
    file.write_text(json.dumps(summary))
    before = file.read_bytes()
    pfedlms.resume(tmp_path, (X, Y), linear, progress=False)
    assert file.read_bytes() == before


@pytest.mark.parametrize(("scheme", "told"), [("iid", "partition iid"), ("dirichlet", "α = 0.5")])
def test_a_plan_names_alpha_where_it_counts(scheme: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [each for each in OPTIONS if each != "--quiet"]
    assert main(["run", "--partition", scheme, "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert f"3 clients, {told}, " in shown
    assert ("α" in shown) == ("α" in told)


class Drawn:
    """Figures that would have been saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        figures = pytest.importorskip("matplotlib.figure")
        self.titles: list[str] = []
        monkeypatch.setattr(figures.Figure, "savefig", lambda figure, _: self.titles.append(self.title(figure)))

    @staticmethod
    def title(figure: Any) -> str:
        return str(figure.axes[0].get_title(loc="left"))


def test_plots_have_a_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, plot = Drawn(monkeypatch), ["--plot", str(tmp_path / "p.png")]
    compare = ["compare", "--methods", "local", "--seeds", "1", "--partition", "iid", "--out", str(tmp_path / "c")]
    assert main([*compare, *OPTIONS, *plot]) == 0
    sweep = ["sweep", "--method", "local", "--learning-rate", ".1,.2", "--alpha", "0.3", "--out", str(tmp_path / "s")]
    assert main([*sweep, "--validation", "0.2", *OPTIONS, *plot]) == 0
    assert drawn.titles == ["digits · 3 clients · partition iid", "local on digits · 3 clients · α = 0.3"]


def test_a_title_leaves_out_what_is_swept() -> None:
    config, summary = load_config(None, {"data": {"clients": 3}}), {"clients": 3, "partition": "dirichlet"}
    assert set_up(config, summary, ["train.rounds"]) == "digits · 3 clients · α = 0.5"
    assert set_up(config, summary, ["data.alpha"]) == "digits · 3 clients"
    assert set_up(config, summary, ["data.clients", "data.partition"]) == "digits"


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
        pfedlms.run(*given, out=tmp_path / "r", clients=3, callbacks=[Pressing()], **SMALL)
    expected = ", ".join([repr(str(tmp_path / "r")), *([call] if call else [])])
    assert str(caught.value) == f"interrupted; resume with pfedlms.resume({expected})"
    assert main(["show", str(tmp_path / "r")]) == 0
    told = f"pfedlms.resume({expected})" if call else f"pfedlms resume {tmp_path / 'r'}"
    assert capsys.readouterr().err == f"after 2 rounds; not finished. Resume with: {told}\n"


def test_an_interrupted_study_names_all_that_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {key: value for key, value in SMALL.items() if key != "method"}
    out = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.compare((X, Y), linear, methods="local", out=out, clients=3, callbacks=[Pressing()], **settings)
    call = f"pfedlms.resume_study({str(out)!r}, data, model)"
    assert str(caught.value) == f"interrupted; resume with {call}"
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().err.endswith(f"Resume with: {call}\n")


def test_best_alone_says_what_it_goes_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--best", "-o", "b.pt"]) == 2
    assert "--best goes with --client K or --global, and -o FILE, or with --all FOLDER" in capsys.readouterr().err


# --- tables ---


@pytest.mark.parametrize(("methods", "there"), [("local,stc", False), ("local,fedavg", True)])
def test_without_fedavg_nothing_is_compared_with_it(methods: str, there: bool) -> None:
    settings = {key: value for key, value in SMALL.items() if key != "method"}
    done = pfedlms.compare((X, Y), linear, methods=methods, seeds=1, clients=3, **settings)
    text = comparison_text(done.summaries)
    assert ("fewer" in text) == there
    assert ("FedAvg" in text) == there


def test_a_narrow_table_has_notes_that_can_be_read() -> None:
    note = "P-acc of each participant's own model on its own test split after local steps, in percent of all samples"
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(["a", "b"], [["x", "1"]], "a title of more than eight columns", note))
    lines = [line.strip() for line in captured.get().splitlines() if line.strip()]
    assert lines[0] == "a title of more than eight columns"
    assert lines[-2:] == [
        "P-acc of each participant's own model on its own test split",
        "after local steps, in percent of all samples",
    ]
