"""`pfedlms reproduce`: plans against the paper's tables, cells that are kept, measured beside printed."""

from __future__ import annotations

import csv
import json
import signal
import tomllib
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

import pfedlms
import pfedlms.reproduce.play as playing
from pfedlms.cli import main
from pfedlms.cli.folders import sections_of
from pfedlms.errors import RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.callbacks import Callback
from pfedlms.reproduce import EXPERIMENTS, NAMES, Outcome, Wanted, reproduce
from pfedlms.reproduce.budget import equal_rate, taken
from pfedlms.reproduce.bytes_to import bytes_to_most_of_the_gain, first_reaching, frugal_fedavg
from pfedlms.reproduce.cells import cell, measures, tables_of
from pfedlms.reproduce.paper import Printed, along, printed
from pfedlms.reproduce.plans import Row
from pfedlms.reproduce.play import Measured, Where, config_of, play, read_rows
from pfedlms.reproduce.sheets import against_paper

PAPER = Path(pfedlms.__file__).parent / "reproduce" / "paper.toml"


def test_the_papers_numbers_are_found_by_table_row_and_data_set() -> None:
    assert printed("table1", "pfedlms", "cifar10") == Printed(82.14, 0.46)
    assert printed("table2", "zsign", "mnist") == Printed(95.63, 0.45)
    assert printed("communication", "fedavg", "cifar100") == Printed(1495.34)
    assert printed("table1", "sketchvote", "mnist") is None
    assert printed("table1", "pfedlms", "digits") is None
    assert along("refresh", "h", 10, "mnist") == Printed(97.00)
    assert along("lambda", "values", 0.01, "cifar100") == Printed(66.84)
    assert along("thresholds", "T", 3, "cifar10") is None


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_every_row_of_the_papers_tables_is_trained(name: str) -> None:
    numbers = tomllib.loads(PAPER.read_text())[name]
    for dataset in numbers["columns"]:
        rows = {row.label: row.printed for row in EXPERIMENTS[name].of(dataset)}
        assert {"local", "sketchvote", "stc@sketchvote", "pfed1bs@pfedlms", "pfedlms@pfed1bs"} <= rows.keys()
        for method, values in numbers.items():
            if method != "columns":
                assert rows[method] == Printed(*values[numbers["columns"].index(dataset)])


@pytest.mark.parametrize(
    ("name", "dataset", "label", "settings", "value"),
    [
        ("ablation", "svhn", "T=7, whole model", {"layerwise": False}, 91.41),
        ("ablation", "cifar10", "refined pfed1bs (T=1, whole model)", {"layerwise": False, "thresholds": 1}, 78.68),
        ("thresholds", "cifar10", "T = 2", {"thresholds": 2}, 81.05),
        ("refresh", "mnist", "h = 50", {"refresh": 50}, 96.44),
        ("lambda", "fmnist", "λ = 0.005", {"strength": 0.005}, 97.64),
    ],
)
def test_a_row_stands_for_its_settings(
    name: str, dataset: str, label: str, settings: dict[str, Any], value: float
) -> None:
    (row,) = [row for row in EXPERIMENTS[name].of(dataset) if row.label == label]
    assert row.printed == Printed(value)
    own = tables_of(dataset, row.variant)["method"]
    assert own == {"name": "pfedlms", **settings}


@pytest.mark.parametrize("variant", ["stc@sketchvote", "pfed1bs@pfedlms", "pfedlms@pfed1bs", "sketchvote@stc"])
def test_methods_at_each_others_bytes(variant: str) -> None:
    own, other = variant.split("@")
    settings = {key: value for key, value in tables_of("digits", variant)["method"].items() if key != "name"}
    wanted = taken("digits", other)
    assert abs(taken("digits", own, **settings) - wanted) <= max(4, 0.005 * wanted)
    if own in ("pfedlms", "pfed1bs"):
        shipped = pfedlms.load_config(None, {"data": {"dataset": "digits"}, "method": {"name": own}}).settings
        # How far a step moves a sketched coordinate, 2 η λ N/m, and a model, 2 η λ √N: one stays, the other shrinks.
        coordinate = settings["strength"] / settings["ratio"] / (shipped.strength / shipped.ratio)
        model = settings["strength"] / shipped.strength
        assert max(coordinate, model) == pytest.approx(1)
        assert min(coordinate, model) < 0.5


def test_bytes_that_cannot_be_met() -> None:
    with pytest.raises(UsageError, match="no setting of fedavg says how much a message takes"):
        tables_of("digits", "fedavg@pfedlms")
    with pytest.raises(UsageError, match="pfed1bs: no ratio takes 100000000 bytes"):
        equal_rate("digits", "pfed1bs", 100_000_000)


SMALL = Wanted(datasets=("digits",), methods=("local", "fedavg", "sketchvote"), seeds=(0, 1), quick=True)


class Counting(Callback):
    def __init__(self) -> None:
        self.began: list[tuple[str, int]] = []

    def on_start(self, run: Any) -> None:
        self.began.append((Path(run.config.run.out).name, run.round))


def test_cells_are_trained_once_and_used_by_every_table_that_has_them(tmp_path: Path) -> None:
    where, progress = Where(tmp_path), Counting()
    outcome = reproduce("table1", SMALL, where, [progress])
    first = len(progress.began)
    assert first == 6
    assert {name for name, _ in progress.began} == {
        f"digits_a0.5_{method}_s{seed}_quick" for method in SMALL.methods for seed in (0, 1)
    }
    for name in ("table1", "curves", "budget"):
        reproduce(name, SMALL, where, [progress])
    assert len(progress.began) == first
    (sheet,) = outcome.sheets
    assert "last 10" in sheet.columns.values()
    assert "mean of the last 10 of 10 evaluations" in sheet.note
    for record in sheet.records:
        folders = [tmp_path / f"digits_a0.5_{record['row']}_s{seed}_quick" for seed in (0, 1)]
        metrics = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
        best = [max(each["p_acc"] for each in own) for own in metrics]
        assert len(metrics[0]) == 10
        assert record["max"] == pytest.approx(mean(best))
        assert record["max_deviation"] == pytest.approx(stdev(best))
        sent = mean(sum(own[-1]["bytes"].values()) for own in metrics) / 10 / 2**20
        assert record["mib"] == pytest.approx(sent)
    tables = tmp_path / "quick" / "only-local+fedavg+sketchvote"
    rows = list(csv.DictReader((tables / "budget-digits-points.csv").read_text().splitlines()))
    assert len(rows) == 6 * 10
    assert {row["row"] for row in rows} == set(SMALL.methods)
    assert not list(tmp_path.glob("*.csv"))
    assert (tables / "table1-digits.md").read_text().count("| sketchvote |") == 1


def test_a_report_calls_rows_as_the_tables_do(tmp_path: Path) -> None:
    """Also cells of an earlier version, that no row was written in, once the command was there again."""
    wanted = Wanted(datasets=("digits",), methods=("pfedlms", "pfedlms@pfed1bs"), seeds=(0,), quick=True)
    for _ in range(2):
        reproduce("table1", wanted, Where(tmp_path), [])
        (section,) = sections_of([tmp_path])[0]
        assert {run.label for run in section.runs} == {"pfedlms (quick)", "pfedlms@pfed1bs (quick)"}
        for file in tmp_path.rglob("row.txt"):
            file.unlink()


class StopAt(Callback):
    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        if record["round"] == 4:
            raise KeyboardInterrupt


def test_an_interrupted_cell_goes_on(tmp_path: Path) -> None:
    one = cell("digits", 0.5, "sketchvote", "sketchvote", 0, quick=True)
    with pytest.raises(KeyboardInterrupt):
        play([one], Where(tmp_path / "a"), [StopAt()])
    assert not (tmp_path / "a" / one.name / "summary.json").exists()
    gone_on, whole = (play([one], Where(tmp_path / name), [Counting()]).measured[one] for name in ("a", "b"))
    assert gone_on.summary["status"] == "finished"
    assert gone_on.curve == whole.curve


class FullAt(Callback):
    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        if record["round"] == 4:
            raise OSError(28, "No space left on device")


def test_a_cell_that_found_the_disk_full_goes_on(tmp_path: Path) -> None:
    one = cell("digits", 0.5, "local", "local", 0, quick=True)
    with pytest.raises(Exception, match="No space left"):
        play([one], Where(tmp_path / "a"), [FullAt()])
    gone_on, whole = (play([one], Where(tmp_path / name), [Counting()]).measured[one] for name in ("a", "b"))
    assert gone_on.finished
    assert gone_on.curve == whole.curve


class NoRoom(Callback):
    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        raise StorageError(run.config.run.out, "No space left on device", resume=run.config.run.out)


def test_where_the_disk_is_full_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it in a cell that trains, or in one that has no folder yet."""
    one = cell("digits", 0.5, "local", "local", 0, quick=True)
    with pytest.raises(StorageError, match=r"No space left on device.*make room, then the same command") as raised:
        play([one], Where(tmp_path), [NoRoom()])
    assert "pfedlms resume" not in str(raised.value)

    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match=r"No space left on device.*make room, then the same command"):
        play([one], Where(tmp_path / "other"), [Counting()])


class SignalAt(Callback):
    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        if record["round"] == 4:
            signal.raise_signal(signal.SIGINT)


def test_after_a_signal_what_there_is_counts_and_nothing_more_is_trained(tmp_path: Path) -> None:
    first, second, third = (cell("digits", 0.5, "local", "local", seed, quick=True) for seed in range(3))
    play([third], Where(tmp_path), [Counting()])
    played = play([first, second, third], Where(tmp_path), [SignalAt()])
    assert played.stopped == signal.SIGINT
    assert [played.measured[each].summary["status"] for each in (first, third)] == ["interrupted", "finished"]
    assert second not in played.measured


def test_a_folder_with_other_settings_is_not_taken_for_the_cell(tmp_path: Path) -> None:
    one = cell("digits", 0.5, "local", "local", 0, quick=True)
    pfedlms.run(method="local", rounds=2, alpha=0.4, out=tmp_path / one.name)
    with pytest.raises(RunDirectoryError, match="holds a run with other settings"):
        play([one], Where(tmp_path), [Counting()])


def test_rows_measured_elsewhere_are_used_where_their_settings_are_the_cells(tmp_path: Path) -> None:
    one, other = (cell("digits", alpha, "local", "local", 0, quick=True) for alpha in (0.5, 0.1))
    summary = {"accuracy": {"max": 12.0, "last10": 11.0, "final": 11.0}, "bytes_per_round": {}, "seed": 0}
    row = {"config": one.config().tables(), "status": "finished", "summary": summary, "curve": {}}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "else.json").write_text("{}")
    known = read_rows([tmp_path])
    progress = Counting()
    played = play([one, other], Where(tmp_path / "out"), [progress], known)
    assert played.measured[one].summary["accuracy"]["max"] == 12.0
    assert [name for name, _ in progress.began] == [other.name]
    for wrong in ("else.json", "none.json"):
        with pytest.raises(UsageError, match=f"--rows: .*{wrong}"):
            read_rows([tmp_path / wrong])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("run", "seed", 1), ("run", "lost", 0.3), ("run", "evaluate_every", 2), ("data", "alpha", 0.4),
     ("data", "validation", 0.2), ("train", "rounds", 11), ("method", "strength", 0.06)],
)  # fmt: skip
def test_rows_with_other_settings_are_not_used(section: str, key: str, value: float, tmp_path: Path) -> None:
    one = cell("digits", 0.5, "pfedlms", "pfedlms", 0, quick=True)
    tables = one.config().tables()
    assert tables[section][key] != value
    tables[section][key] = value
    row = {"config": tables, "status": "finished", "summary": {"seed": 0}, "curve": {}}
    progress = Counting()
    play([one], Where(tmp_path), [progress], [row])
    assert [name for name, _ in progress.began] == [one.name]


def test_no_configuration_is_made_of_rows_that_are_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another data set, method or seed is seen at a glance; a seed that is not named is 0, the default. And what a row
    measures is worked out once, however many cells there are."""
    cells = [cell("digits", alpha, "local", "local", 0, quick=True) for alpha in (0.1, 0.3, 0.5)]
    rows = []
    others = ("data", "dataset", "mnist"), ("method", "name", "fedavg"), ("run", "seed", 1)
    for section, key, value in (*others, ("data", "alpha", 0.7), ("run", "seed", None)):
        tables = cells[-1].config().tables()
        tables[section][key] = value
        if value is None:
            del tables[section][key]
        rows.append({"config": tables, "status": "finished", "summary": {"seed": 0}, "curve": {}})
    made, worked_out = [], []
    monkeypatch.setattr(playing, "config_of", lambda row: made.append(row) or config_of(row))
    monkeypatch.setattr(playing, "measures", lambda config: worked_out.append(config) or measures(config))
    progress = Counting()
    found = play(cells, Where(tmp_path), [progress], rows).measured
    assert made == rows[len(others) :]
    assert len(worked_out) == len(cells) + 2
    assert found[cells[2]].summary == {"seed": 0, "status": "finished"}
    assert [name for name, _ in progress.began] == [own.name for own in cells[:2]]


def test_a_row_older_than_a_setting_has_its_default_not_what_is_shipped_now(tmp_path: Path) -> None:
    """Digits come with 252 hidden units; a row that does not say how many had 256, the default."""
    one = cell("digits", 0.5, "local", "local", 0, quick=True)
    tables = one.config().tables()
    assert tables["model"].pop("hidden") == 252
    progress = Counting()
    play([one], Where(tmp_path), [progress], [{"config": tables, "status": "finished", "summary": {}, "curve": {}}])
    assert [name for name, _ in progress.began] == [one.name]


def test_data_that_only_a_shorter_fedavg_needs_are_named_too(tmp_path: Path) -> None:
    """All cells of SVHN are known but for FedAvg at sketchvote's total bytes, and there are no files."""
    rows = []
    for method, sent in (("local", 0), ("fedavg", 1000), ("sketchvote", 10)):
        one = cell("svhn", 0.5, method, method, 0)
        known = measured([90.0], sent)
        summary = {**known.summary, "total_bytes": 200 * sent}
        rows.append({"config": one.config().tables(), "status": "finished", "summary": summary, "curve": known.curve})
    wanted = Wanted(("svhn",), ("local", "fedavg", "sketchvote"), (0,), rows=rows)
    outcome = reproduce("budget", wanted, Where(tmp_path), [])
    assert "svhn" in outcome.missing


def measured(p_acc: list[float], sent: int, status: str = "finished", seed: int = 0) -> Measured:
    rounds = list(range(1, len(p_acc) + 1))
    tail = p_acc[-10:]
    accuracy = {"max": max(p_acc), "last10": sum(tail) / len(tail), "final": p_acc[-1]}
    summary = {"status": status, "accuracy": accuracy, "bytes_per_round": {"up": sent}, "seed": seed}
    return Measured(summary, {"round": rounds, "p_acc": p_acc, "bytes": [sent * number for number in rounds]})


SENT = {"up": 100}


def paid(total: int) -> Measured:
    """FedAvg takes 100 bytes a round, another `total` in all."""
    own = measured([90.0], 100)
    return Measured({**own.summary, "bytes_per_round": SENT, "total_bytes": total}, own.curve)


@pytest.mark.parametrize(
    ("total", "label"),
    [
        (350, "fedavg, 3 rounds (bytes of sketchvote)"),
        (100, "fedavg, 1 round (bytes of sketchvote)"),
        (99, "fedavg, 1 round (> bytes of sketchvote)"),
    ],
)
def test_fedavg_for_the_bytes_of_another(total: int, label: str) -> None:
    done = [cell("digits", 0.5, "sketchvote", "sketchvote", 0)]
    found = frugal_fedavg(0.5, {"fedavg": [paid(20_000)], "sketchvote": [paid(total)]}, done)
    assert list(found) == [label]
    (one,) = found[label]
    assert one.config().train.rounds == max(1, total // 100)


def test_how_many_evaluations_the_last_10_are_of() -> None:
    """Of most rows; one that stops early on purpose has fewer."""
    rows = [Row("long", "x"), Row("short", "y")]

    def of(long: int, short: int) -> tuple[str, str]:
        cells = {"long": [measured([90.0] * long, 1)], "short": [measured([90.0] * short, 1)]}
        sheet = against_paper("t", "title", "digits", rows, cells)
        return sheet.columns["last10 ± last10_deviation"], sheet.note

    for long, short, heading, told in (
        (40, 40, "last 10", "mean of the last 10 evaluations;"),
        (12, 12, "last 10", "mean of the last 10 of 12 evaluations;"),
        (4, 4, "last 4", "mean of all 4 evaluations;"),
        (40, 1, "last 10", "mean of the last 10 evaluations, or of all where a row has fewer;"),
    ):
        found, note = of(long, short)
        assert found == heading
        assert told in note


def test_differences_and_what_lies_outside_two_deviations() -> None:
    cells = {
        "near": [measured([90.0], 1 << 20), measured([92.0], 1 << 20)],
        "far": [measured([90.0], 1 << 20), measured([92.0], 1 << 20)],
        "broken": [measured([50.0], 1, "diverged")],
        "single": [measured([50.0], 1)],
    }
    spread = sqrt(2)  # of 90 and 92
    near, far = 91 - 2 * sqrt(spread**2 + 1) + 0.01, 91 - 2 * sqrt(spread**2 + 1) - 0.01
    rows = [Row("near", "x", Printed(near, 1.0)), Row("far", "x", Printed(far, 1.0)), Row("broken", "x", Printed(1.0))]
    rows.append(Row("single", "x", Printed(90.0, 0.1)))
    records = against_paper("t", "title", "digits", rows, cells).records
    assert [record.get("outside") for record in records] == [False, True, None, False]
    assert records[0]["difference"] == pytest.approx(91 - near)
    assert records[0]["mib"] == 1
    assert records[2]["row"] == "broken (1 diverged)"
    shown = against_paper("t", "title", "digits", rows, cells).shown()
    assert shown[1][3].endswith(" *")
    assert not shown[0][3].endswith("*")
    (level,) = against_paper("t", "title", "digits", [Row("near", "x", Printed(91.001))], cells).shown()
    assert level[3] == "+0.00"  # not −0.00


def test_bytes_to_most_of_the_gain() -> None:
    """local ends at 80, FedAvg at 90: 89 is what counts."""
    cells = {
        "local": [measured([80.0] * 10, 0)],
        "fedavg": [measured([70.0, 88.9, 89.0, *[90.0] * 10], 100)],
        "never": [measured([88.0] * 10, 1)],
    }
    assert first_reaching(cells["fedavg"][0], 89.0) == (3, 300)
    sheet = bytes_to_most_of_the_gain("digits", cells)
    assert sheet is not None
    found = {record["row"]: record for record in sheet.records}
    assert found["fedavg"]["rounds"] == 3
    assert found["fedavg"]["mib"] == 300 / 2**20
    assert "mib" not in found["never"]
    for name, start in (("local", 60.0), ("fedavg", 50.0), ("never", 68.0)):  # 20 points lower with seed 1
        cells[name].append(measured([start, *[{"local": 60.0, "fedavg": 70.0}.get(name, 69.0)] * 12], 100, seed=1))
    sheet = bytes_to_most_of_the_gain("digits", cells)
    assert sheet is not None
    found = {record["row"]: record for record in sheet.records}
    assert found["fedavg"]["reached"] == "2 of 2"
    assert found["fedavg"]["rounds"] == (3 + 2) / 2
    assert found["never"]["reached"] == "1 of 2"
    assert [own[2] for own in sheet.shown() if own[0] == "fedavg"] == ["2"]  # 2.5, halves to even
    more = {**cells, "broken": [measured([1.0], 1, "diverged")], "fedavg, 1 round (bytes of x)": [measured([99.0], 1)]}
    again = bytes_to_most_of_the_gain("digits", more)
    assert again is not None
    assert again.records == sheet.records
    assert bytes_to_most_of_the_gain("digits", {"local": cells["local"]}) is None


@pytest.mark.parametrize(("dataset", "fedavg", "own"), [("mnist", 31.06, 0.38), ("cifar10", 42.68, 0.72)])
def test_communication_is_the_papers_to_two_decimals(dataset: str, fedavg: float, own: float, tmp_path: Path) -> None:
    (sheet,) = reproduce("communication", Wanted(datasets=(dataset,)), Where(tmp_path), []).sheets
    found = {record["row"]: record for record in sheet.records}
    assert round(found["fedavg"]["mib"], 2) == fedavg
    assert round(found["pfedlms"]["mib"], 2) == own
    assert abs(found["pfedlms"]["difference"]) < 1e-9


def test_distributions_are_of_the_shared_model_and_kept(tmp_path: Path) -> None:
    wanted, progress = Wanted(datasets=("digits",), quick=True), Counting()
    sheet, bins, accuracy = reproduce("distributions", wanted, Where(tmp_path), [progress]).sheets
    assert [record["round"] for record in sheet.records] == [0, 0, 1, 1, 9, 9]
    result = pfedlms.run(method="fedavg", rounds=10, alpha=0.5)
    model = result.federation.shared_state_dict()
    assert model is not None
    matrices = [values.double() for values in model.values() if values.ndim > 1]
    last = [record["deviation"] for record in sheet.records[-2:]]
    assert last == pytest.approx([values.std(correction=0).item() for values in matrices])
    assert sheet.shown()[-1][-1] == f"{last[-1]:.3f}"

    assert accuracy.records == [{"round": own["round"] - 1, "g_acc": own["g_acc"]} for own in result.metrics]
    own = [record for record in bins.records if record["round"] == 9][80:]
    counts = [matrices[1].ge(record["from"]).sum() - matrices[1].ge(record["to"]).sum() for record in own[:-1]]
    widths = [record["to"] - record["from"] for record in own]
    shares = [count.item() / matrices[1].numel() for count in counts]
    areas = [record["density"] * width for record, width in zip(own, widths, strict=True)]
    assert areas[:-1] == pytest.approx(shares)
    assert sum(areas) == pytest.approx(1)
    assert {file.name for file in (tmp_path / "quick").glob("*.csv")} == {
        f"distributions-digits{tail}.csv" for tail in ("", "-points", "-accuracy-points")
    }

    assert len(progress.began) == 3
    again, *_ = reproduce("distributions", wanted, Where(tmp_path), [progress]).sheets
    assert len(progress.began) == 3
    assert again.records == sheet.records


def test_interrupted_distributions_go_on_where_they_were(tmp_path: Path) -> None:
    wanted, progress = Wanted(datasets=("digits",), quick=True), Counting()
    stopped = reproduce("distributions", wanted, Where(tmp_path / "a"), [SignalAt()])
    assert (stopped.stopped, stopped.sheets) == (signal.SIGINT, [])
    gone_on, whole = (reproduce("distributions", wanted, Where(tmp_path / name), [progress]) for name in ("a", "b"))
    assert progress.began[0] == ("digits_a0.5_fedavg-rounds10_s0", 4)
    assert [sheet.records for sheet in gone_on.sheets] == [sheet.records for sheet in whole.sheets]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "paper")
    line = ["reproduce", "table1", "--datasets", "digits", "--methods", "local", "--quick", "--out", out]
    assert main([*line, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "digits: Table 1, α = 0.5, a quick look" in " ".join(shown.out.split())
    assert f"results: {out}" in shown.err.replace("\n", "")
    assert main([*line, "--json", "--quiet"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["sheets"]["table1-digits"]
    assert record["row"] == "local"
    assert main(["reproduce", "table1", "--datasets", "mnist", "--methods", "local", "--out", out, "--quiet"]) == 1
    assert "mnist: cells stay open: data.dir: the data set 'mnist' is read from files" in capsys.readouterr().err
    for wrong, message in {
        ("tabel1",): "got 'tabel1'; did you mean table1",
        ("table1", "--datasets", "mnits"): "mnits",
        ("table1", "--methods", "pfedlm", "--datasets", "digits"): "did you mean pfedlms",
        ("table1", "--datasets", "file:../a.npz"): "--datasets: got 'file:../a.npz', expected some of: digits, mnist",
    }.items():
        assert main(["reproduce", *wrong, "--out", out]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reproduce", "table1", "--seeds", "0"])
    assert "--seeds: got 0, expected a count of at least 1" in capsys.readouterr().err


def test_rounds_of_the_figure_are_marked_where_they_are() -> None:
    """The figure counts from 0, an evaluation from 1."""
    pytest.importorskip("altair")
    from pfedlms.reproduce.figures import distributions

    layers = {"1.weight": {"density": [1.0, 1.0], "edges": [0.0, 0.5, 1.0], "deviation": 0.3}}
    document = {
        "stages": [{"round": number, "layers": layers} for number in (0, 1, 9)],
        "curve": {"round": list(range(1, 11)), "g_acc": [10.0 * number for number in range(10)]},
    }
    accuracy = distributions(document).to_dict()["hconcat"][-1]
    dots = accuracy["layer"][-1]["data"]["values"]
    line = accuracy["data"]["values"]
    assert [(point["x"], point["mean"]) for point in line] == [(number, 10.0 * number) for number in range(10)]
    assert [(point["x"], point["mean"]) for point in dots] == [(number, 10.0 * number) for number in (0, 1, 9)]


def test_what_will_be_trained_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["reproduce", "table1", "--datasets", "digits,digits", "--quick", "--seeds", "2", "--out", str(tmp_path)]
    assert main([*line, "--methods", "local"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("digits: 2 cells, 0 known or finished, 2 to train\n")
    assert shown.out.count("P-acc max") == 1
    assert main([*line, "--methods", "local,fedavg"]) == 0
    assert "digits: 4 cells, 2 known or finished, 2 to train\n" in capsys.readouterr().err
    assert main([*line, "--methods", "local,fedavg", "--quiet"]) == 0
    assert "cells" not in capsys.readouterr().err
    tables = {str(file.parent.relative_to(tmp_path / "quick")) for file in tmp_path.rglob("table1-digits.csv")}
    assert tables == {"only-local", "only-local+fedavg"}


def test_a_cell_that_diverged_makes_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for method, status in (("local", "finished"), ("pfedlms", "diverged")):
        known = measured([90.0], 1)
        config = cell("digits", 0.5, method, method, 0).config().tables()
        rows.append({"config": config, "status": status, "summary": dict(known.summary), "curve": known.curve})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    line = ["reproduce", "table1", "--datasets", "digits", "--seeds", "1", "--out", str(tmp_path / "out")]
    line += ["--rows", str(tmp_path / "rows.json")]
    assert main([*line, "--methods", "local"]) == 0
    assert main([*line, "--methods", "local,pfedlms"]) == 1
    shown = capsys.readouterr()
    assert "pfedlms (1 diverged)" in shown.out
    assert "error: 1 cell came to no end" in shown.err


@pytest.mark.parametrize("name", ["distributions", "convergence"])
def test_figures_without_data_stay_open(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    assert main(["reproduce", name, "--datasets", "mnist", "--out", str(tmp_path), "--quiet"]) == 1
    assert "mnist: cells stay open: data.dir: the data set 'mnist' is read from files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "step", "kept"),
    [("table1", "outcome.play", "what was finished, the latest checkpoint, too"),
     ("distributions", "distributions.play", "what was finished, the latest checkpoint, too"),
     ("convergence", "convergence.follow", "what was finished, the run it was in begins again")],
)  # fmt: skip
def test_two_quick_interrupts_name_the_same_command_and_what_is_kept(
    name: str, step: str, kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"pfedlms.reproduce.{step}", twice)
    assert main(["reproduce", name, "--datasets", "digits", "--out", str(tmp_path)]) == 130
    told = capsys.readouterr().err
    assert f"{tmp_path} keeps {kept}. The same command goes on." in told
    assert "pfedlms resume" not in told


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("name", "given", "told"),
    [("convergence", ["--seeds", "3", "--methods", "fedavg"],
      "warning: convergence: --methods and --seeds without effect; it is of pFedLMS, seed 0\n"),
     ("distributions", ["--methods", "pfedlms"], "warning: distributions: --methods without effect; it is of FedAvg"),
     ("distributions", ["--seeds", "1"], "results: "),
     ("table1", ["--seeds", "2", "--methods", "fedavg"], "results: ")],
)  # fmt: skip
def test_options_that_an_experiment_does_not_look_at_are_named(
    name: str, given: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pfedlms.reproduce.reproduce", lambda *_: Outcome())
    assert main(["reproduce", name, *given]) == 0
    assert capsys.readouterr().err.startswith(told)


def test_help_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
