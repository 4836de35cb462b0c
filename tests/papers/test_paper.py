"""The paper's tables and figures: planned cells, stored runs, and measured numbers beside the printed ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import papers.pfedlms.__main__ as command
import pytest
from papers.pfedlms import distributions
from papers.pfedlms.experiments import EXPERIMENTS, Row, cell, cost, equal_rate, paper, settings_of, taken
from papers.pfedlms.reproduce import reproduce
from papers.pfedlms.runs import Outcome, Wanted, config_of, gather, read_rows
from papers.pfedlms.sheets import against_paper, bytes_to_most_of_the_gain, difference_text, flat, frugal_fedavg

import pfedlms
from pfedlms.cli import main
from pfedlms.errors import RunDirectoryError, UsageError
from pfedlms.report.runs import Spread

# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_every_row_of_the_tables_is_planned(name: str) -> None:
    numbers = paper()[name]
    for dataset in numbers["columns"]:
        rows = {row.label: row.printed for row in EXPERIMENTS[name].of(dataset)}
        assert {"local", "sketchvote", "stc@sketchvote", "pfed1bs@pfedlms", "pfedlms@pfed1bs"} <= rows.keys()
        for method, values in numbers.items():
            if method != "columns":
                assert rows[method] == Spread(*values[numbers["columns"].index(dataset)])


@pytest.mark.parametrize(
    ("name", "dataset", "label", "settings", "value"),
    [
        ("ablation", "cifar10", "refined pfed1bs (T=1, whole model)", {"layerwise": False, "thresholds": 1}, 78.68),
        ("thresholds", "cifar10", "T = 2", {"thresholds": 2}, 81.05),
        ("refresh", "mnist", "h = 50", {"refresh": 50}, 96.44),
        ("lambda", "fmnist", "λ = 0.005", {"strength": 0.005}, 97.64),
        ("thresholds", "cifar10", "T = 3", {"thresholds": 3}, None),
    ],
)
def test_a_row_has_its_settings(
    name: str, dataset: str, label: str, settings: dict[str, Any], value: float | None
) -> None:
    (row,) = [row for row in EXPERIMENTS[name].of(dataset) if row.label == label]
    assert row.printed == (None if value is None else Spread(value))
    assert settings_of(dataset, row.variant) == {"method": {"name": "pfedlms", **settings}}


@pytest.mark.parametrize("variant", ["stc@sketchvote", "pfed1bs@pfedlms", "pfedlms@pfed1bs", "sketchvote@stc"])
def test_a_method_can_use_as_many_bytes_as_another(variant: str) -> None:
    own, other = variant.split("@")
    settings = {key: value for key, value in settings_of("digits", variant)["method"].items() if key != "name"}
    wanted = taken("digits", other)
    assert abs(taken("digits", own, **settings) - wanted) <= max(4, 0.005 * wanted)
    if own in ("pfedlms", "pfed1bs"):
        shipped = pfedlms.load_config(None, {"data": {"dataset": "digits"}, "method": {"name": own}}).settings
        # How far a step moves a sketched coordinate, 2 η λ N/m, and a model, 2 η λ √N: one stays, the other shrinks.
        coordinate = settings["strength"] / settings["ratio"] / (shipped.strength / shipped.ratio)
        model = settings["strength"] / shipped.strength
        assert max(coordinate, model) == pytest.approx(1)
        assert min(coordinate, model) < 0.5


def test_a_cell_may_have_another_model() -> None:
    """vgg8 has 279,706 parameters for ten classes; for a hundred its last layer has 90 · (128 + 1) more."""
    assert cost("cifar100/vgg8", "fedavg")["parameters"] == 279_706 + 90 * 129
    assert cell("cifar100/vgg8", 0.5, "eden") == cell("cifar100", 0.5, "eden") | {"model": {"name": "vgg8"}}
    (row,) = EXPERIMENTS["table1"].of("cifar100/vgg8", ["eden"])
    assert row.printed == Spread(38.81, 1.39)


def test_a_number_of_bytes_without_matching_settings_is_refused() -> None:
    with pytest.raises(UsageError, match="no setting of fedavg says how large a message is"):
        settings_of("digits", "fedavg@pfedlms")
    with pytest.raises(UsageError, match="pfed1bs: no ratio takes 100000000 bytes"):
        equal_rate("digits", "pfed1bs", 100_000_000)


# --- runs -------------------------------------------------------------------------------------------------------------

METHODS = ("local", "fedavg", "sketchvote")


class RecordStarts(pfedlms.Callback):
    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []

    def on_start(self, run: Any) -> None:
        self.started.append((Path(run.config.run.out).name, run.round))


class InterruptRound4(pfedlms.Callback):
    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        if record["round"] == 4:
            signal.raise_signal(signal.SIGINT)


def wanted(out: Path, *callbacks: Any, **chosen: Any) -> Wanted:
    return Wanted(out, **{"datasets": ("digits",), "quick": True, "progress": False, "callbacks": callbacks, **chosen})


def local(out: Path, *callbacks: Any, alpha: float = 0.5, **chosen: Any) -> tuple[list[pfedlms.Run], Outcome]:
    """The runs of `local`, of one seed unless others are chosen."""
    outcome, cells = Outcome(), {"local": cell("digits", alpha, "local", quick=True)}
    return gather(cells, wanted(out, *callbacks, **{"seeds": (0,), **chosen}), outcome)["local"], outcome


def test_runs_are_trained_once_for_all_tables(tmp_path: Path) -> None:
    recorder = RecordStarts()
    chosen = wanted(tmp_path, recorder, methods=METHODS, seeds=(0, 1))
    outcome = reproduce("table1", chosen)
    assert [name for name, _ in recorder.started] == [f"{method}-seed{seed}" for seed in (0, 1) for method in METHODS]
    for name in ("table1", "curves", "budget"):
        reproduce(name, chosen)
    assert len(recorder.started) == 6
    (sheet,) = outcome.sheets.values()
    for record in sheet.records:
        folders = [tmp_path / "quick" / "digits-a0.5" / f"{record['row']}-seed{seed}" for seed in (0, 1)]
        metrics = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
        best = [max(each["p_acc"] for each in own) for own in metrics]
        assert len(metrics[0]) == 10
        assert (record["max"].mean, record["max"].deviation) == pytest.approx((mean(best), stdev(best)))
        assert record["mib"] == pytest.approx(mean(sum(own[-1]["bytes"].values()) for own in metrics) / 10 / 2**20)
    tables = tmp_path / "quick" / "only-local+fedavg+sketchvote"
    assert (tables / "table1-digits.md").read_text().count("| sketchvote |") == 1


def test_an_interrupted_run_is_reported_and_resumed(tmp_path: Path) -> None:
    local(tmp_path / "a", seeds=(2,))
    runs, outcome = local(tmp_path / "a", InterruptRound4(), seeds=(0, 1, 2))
    assert outcome.signal == signal.SIGINT
    assert [(run.summary["seed"], run.summary["status"]) for run in runs] == [(0, "interrupted"), (2, "finished")]
    recorder = RecordStarts()
    resumed, whole = (local(tmp_path / name, recorder)[0][0] for name in ("a", "b"))
    assert recorder.started == [("local-seed0", 4), ("local-seed0", 0)]
    assert [record["p_acc"] for record in resumed.metrics] == [record["p_acc"] for record in whole.metrics]
    assert resumed.summary["status"] == "finished"


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    other = cell("digits", 0.5, "local", quick=True) | {"train": {"rounds": 3}}
    pfedlms.study(cells={"local": other}, out=tmp_path / "digits-a0.5")
    with pytest.raises(RunDirectoryError, match=r"local-seed0 with another train\.rounds"):
        local(tmp_path)


def stored_row(
    method: str, seed: int = 0, status: str = "finished", dataset: str = "digits", **more: Any
) -> dict[str, Any]:
    """A row that was measured elsewhere, with the settings of a cell."""
    settings = cell(dataset, 0.5, method, quick=dataset == "digits")
    config = pfedlms.load_config(None, {**settings, "run": {**settings.get("run", {}), "seed": seed}}).tables()
    summary = {"accuracy": {"max": 12.0, "last10": 11.0, "final": 11.0}, "bytes_per_round": {}, "seed": seed}
    return {"config": config, "status": status, "summary": {**summary, **more}, "curve": {}}


def test_rows_measured_elsewhere_are_used_if_their_settings_match(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([stored_row("local", seed) for seed in (1, 0)]))
    (tmp_path / "else.json").write_text("{}")
    recorder = RecordStarts()
    runs, _ = local(tmp_path / "out", recorder, seeds=(0, 1, 2), rows=read_rows([tmp_path]))
    assert [run.summary["accuracy"]["max"] == 12.0 for run in runs] == [True, True, False]
    assert [name for name, _ in recorder.started] == ["local-seed2"]
    for wrong in ("else.json", "none.json"):
        with pytest.raises(UsageError, match=f"--rows: .*{wrong}"):
            read_rows([tmp_path / wrong])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("run", "seed", 1), ("run", "evaluate_every", 2), ("data", "alpha", 0.4), ("model", "hidden", None)],
)
def test_rows_with_other_settings_are_not_used(section: str, key: str, value: float | None, tmp_path: Path) -> None:
    """Digits come with 252 hidden units; a row that does not say how many had 256, the default."""
    row = stored_row("local")
    assert row["config"][section].pop(key) != value
    if value is not None:
        row["config"][section][key] = value
    recorder = RecordStarts()
    local(tmp_path, recorder, rows=[row])
    assert [name for name, _ in recorder.started] == ["local-seed0"]


def test_committed_rows_are_still_read() -> None:
    """A setting that is removed must not take the tables of the docs with it."""
    rows = read_rows([Path(__file__).parents[2] / "benchmarks" / "results"])
    named = [row for row in rows if not row.get("model") and row["config"]["method"]["name"] in pfedlms.methods.METHODS]
    assert len(named) > 2000
    assert not [row["cell"] for row in named if config_of(row) is None]


# --- sheets -----------------------------------------------------------------------------------------------------------


def measured(p_acc: list[float], sent: int, status: str = "finished", seed: int = 0, total: int = 0) -> pfedlms.Run:
    """A run with these evaluations and so many bytes per round."""
    tail = p_acc[-10:]
    accuracy = {"max": max(p_acc), "last10": sum(tail) / len(tail), "final": p_acc[-1]}
    summary = {"status": status, "accuracy": accuracy, "bytes_per_round": {"up": sent}, "seed": seed}
    metrics = [
        {"round": number, "p_acc": value, "bytes": {"up": sent * number}} for number, value in enumerate(p_acc, start=1)
    ]
    return pfedlms.Run(pfedlms.load_config(), metrics=metrics, summary={**summary, "total_bytes": total})


@pytest.mark.parametrize(
    ("total", "label"),
    [
        (350, "fedavg, 3 rounds (bytes of sketchvote)"),
        (100, "fedavg, 1 round (bytes of sketchvote)"),
        (99, "fedavg, 1 round (> bytes of sketchvote)"),
    ],
)
def test_fedavg_has_as_many_rounds_as_the_bytes_of_another_method_allow(total: int, label: str) -> None:
    runs = {"fedavg": [measured([90.0], 100, total=20_000)], "sketchvote": [measured([90.0], 1, total=total)]}
    assert frugal_fedavg(runs) == {label: max(1, total // 100)}


def test_missing_data_are_named_also_for_a_shorter_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells of SVHN are known but for FedAvg at sketchvote's total bytes, and there are no files."""
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    sent = {"local": 0, "fedavg": 1000, "sketchvote": 10}
    rows = [
        stored_row(method, dataset="svhn", bytes_per_round={"up": own}, total_bytes=200 * own, clients=20)
        for method, own in sent.items()
    ]
    chosen = wanted(tmp_path, datasets=("svhn",), methods=tuple(sent), seeds=(0,), quick=False, rows=rows)
    outcome = reproduce("budget", chosen)
    assert "svhn" in outcome.missing
    (first, *_) = outcome.sheets.values()
    assert [record["row"] for record in first.records][3] == "fedavg, 2 rounds (bytes of sketchvote)"


def test_differences_beyond_two_deviations_are_marked() -> None:
    pair = [measured([90.0], 1 << 20), measured([92.0], 1 << 20)]
    runs = {"near": pair, "far": pair, "broken": [measured([50.0], 1, "diverged")], "single": [measured([50.0], 1)]}
    width = 2 * sqrt(2 + 1)  # 90 and 92 have the variance 2
    rows = [Row("near", "x", Spread(91 - width + 0.01, 1.0)), Row("far", "x", Spread(91 - width - 0.01, 1.0))]
    rows += [Row("broken", "x", Spread(1.0)), Row("single", "x", Spread(90.0, 0.1))]
    sheet = against_paper("title", "digits", rows, runs)
    marks = {record["row"]: record.get("outside") for record in sheet.records}
    assert marks == {"near": False, "far": True, "broken (1 diverged)": None, "single": None}
    assert sheet.records[0]["difference"] == pytest.approx(width - 0.01)
    assert sheet.records[0]["mib"] == 1
    assert flat(sheet.records[0])["max_deviation"] == pytest.approx(sqrt(2))
    assert difference_text(91 - 91.001) == "+0.00"  # not −0.00


def test_bytes_to_most_of_the_gain() -> None:
    """local ends at 80, FedAvg at 90: 89 is what counts; 20 points less with seed 1."""
    runs = {
        "local": [measured([80.0] * 10, 0), measured([60.0] * 10, 0, seed=1)],
        "fedavg": [measured([70.0, 88.9, 89.0, *[90.0] * 10], 100), measured([50.0, *[70.0] * 12], 100, seed=1)],
        "some": [measured([88.0] * 10, 1), measured([69.0] * 10, 1, seed=1)],
        "broken": [measured([1.0], 1, "diverged")],
        "fedavg, 1 round (bytes of x)": [measured([99.0], 1)],
    }
    sheet = bytes_to_most_of_the_gain("digits", runs)
    found = {record["row"]: record for record in sheet.records}
    assert list(found) == ["local", "fedavg", "some"]
    assert found["fedavg"] == {"row": "fedavg", "reached": "2 of 2", "rounds": (3 + 2) / 2, "mib": 250 / 2**20}
    assert found["some"] == {"row": "some", "reached": "1 of 2"}
    assert "| fedavg | 2 of 2 | 2 |" in sheet.markdown()  # 2.5, halves to even
    assert bytes_to_most_of_the_gain("digits", {"local": runs["local"]}) is None


@pytest.mark.parametrize(("dataset", "fedavg", "own"), [("mnist", 31.06, 0.38), ("cifar10", 42.68, 0.72)])
def test_communication_equals_that_of_the_paper(dataset: str, fedavg: float, own: float, tmp_path: Path) -> None:
    (sheet,) = reproduce("communication", wanted(tmp_path, datasets=(dataset,))).sheets.values()
    found = {record["row"]: record for record in sheet.records}
    assert round(found["fedavg"]["mib"], 2) == fedavg
    assert round(found["pfedlms"]["mib"], 2) == own
    assert abs(found["pfedlms"]["difference"]) < 1e-9


# --- Figure 1 ---------------------------------------------------------------------------------------------------------


def test_distributions_are_of_the_shared_model_and_resume(tmp_path: Path) -> None:
    recorder = RecordStarts()
    stopped = reproduce("distributions", wanted(tmp_path, InterruptRound4()))
    assert (stopped.signal, stopped.sheets) == (signal.SIGINT, {})
    sheet, bins = reproduce("distributions", wanted(tmp_path, recorder)).sheets.values()
    assert recorder.started == [("fedavg-rounds10-seed0", 4)]
    assert [record["round"] for record in sheet.records] == [0, 0, 1, 1, 9, 9]
    result = pfedlms.run(method="fedavg", rounds=10, alpha=0.5)
    model = result.federation.shared_state_dict()
    matrices = [values.double() for values in model.values() if values.ndim > 1]
    last = [record["deviation"] for record in sheet.records[-2:]]
    assert last == pytest.approx([values.std(correction=0).item() for values in matrices])
    assert f"{last[-1]:.3f} |" in sheet.markdown()
    own = [record for record in bins.records if record["round"] == 9][80:]
    assert (own[0]["from"], own[-1]["to"]) == pytest.approx((matrices[1].min().item(), matrices[1].max().item()))
    assert sum(record["density"] * (record["to"] - record["from"]) for record in own) == pytest.approx(1)
    again, *_ = reproduce("distributions", wanted(tmp_path, recorder)).sheets.values()
    assert len(recorder.started) == 1
    assert again.records == sheet.records


def test_the_figure_marks_its_rounds() -> None:
    """The figure counts from 0, an evaluation from 1."""
    pytest.importorskip("altair")
    layers = {"1.weight": {"density": [1.0, 1.0], "edges": [0.0, 0.5, 1.0], "deviation": 0.3}}
    document = {
        "stages": [{"round": number, "layers": layers} for number in (0, 1, 9)],
        "curve": {"round": list(range(1, 11)), "g_acc": [10.0 * number for number in range(10)]},
    }
    accuracy = distributions.chart(document).to_dict()["hconcat"][-1]
    dots, line = accuracy["layer"][-1]["data"]["values"], accuracy["data"]["values"]
    assert [(point["x"], point["mean"]) for point in line] == [(number, 10.0 * number) for number in range(10)]
    assert [(point["x"], point["mean"]) for point in dots] == [(number, 10.0 * number) for number in (0, 1, 9)]


# --- the command line -------------------------------------------------------------------------------------------------


def test_reproduce(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    out = str(tmp_path / "paper")
    line = ["reproduce", "table1", "--datasets", "digits,digits", "--quick", "--seeds", "2", "--out", out]
    assert main([*line, "--methods", "local"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("digits: 2 cells, 0 known or finished, 2 to train\n")
    assert f"results: {out}" in shown.err.replace("\n", "")
    assert shown.out.count("P-acc max") == 1
    assert "digits: Table 1, α = 0.5, a quick look" in " ".join(shown.out.split())
    assert main([*line, "--methods", "local,fedavg", "--json"]) == 0
    shown = capsys.readouterr()
    assert "digits: 4 cells, 2 known or finished, 2 to train\n" in shown.err
    assert [record["row"] for record in json.loads(shown.out)["sheets"]["table1-digits"]] == ["local", "fedavg"]
    assert main([*line, "--methods", "local,fedavg", "--quiet"]) == 0
    assert "cells" not in capsys.readouterr().err
    tables = {file.parent.name for file in tmp_path.rglob("table1-digits.csv")}
    assert tables == {"only-local", "only-local+fedavg"}
    for name in ("table1", "distributions", "convergence"):
        assert main(["reproduce", name, "--datasets", "mnist", "--out", out, "--quiet"]) == 1
        assert "mnist: cells stay open: data.dir: the data set 'mnist' is read from files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tabel1"], "got 'tabel1'; did you mean table1"),
        (["table1", "--datasets", "mnits"], "--datasets: got 'mnits'; did you mean mnist"),
        (["table1", "--methods", "pfedlm", "--datasets", "digits"], "did you mean pfedlms"),
        (["table1", "--datasets", "file:../a.npz"], "pfedlms compare takes any data"),
    ],
)
def test_wrong_use_is_refused(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*given, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_reproduce_needs_the_papers_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pfedlms.cli.train.__file__", "/site-packages/pfedlms/cli/train.py")
    assert main(["reproduce", "table1"]) == 2
    assert "reproduce: the tables of the paper are not in the installed package" in capsys.readouterr().err


def test_a_run_that_diverged_makes_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [stored_row("local"), stored_row("pfedlms", status="diverged")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    line = ["table1", "--datasets", "digits", "--quick", "--out", str(tmp_path / "out")]
    line += ["--rows", str(tmp_path / "rows.json")]
    assert command.main([*line, "--methods", "local"]) == 0
    assert command.main([*line, "--methods", "local,pfedlms"]) == 1
    shown = capsys.readouterr()
    assert "pfedlms (1 diverged)" in shown.out
    assert "error: 1 run did not finish" in shown.err


def test_an_interrupt_names_the_command_that_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "reproduce", interrupted)
    assert command.main(["table1", "--out", str(tmp_path)]) == 130
    assert f"{tmp_path} keeps what was finished. The same command resumes it." in capsys.readouterr().err


def test_zero_seeds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["table1", "--seeds", "0"])
    assert "--seeds: got 0, expected a count of at least 1" in capsys.readouterr().err
