"""Data of figures, compared with numbers worked out by hand; and the files that figures are saved as."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from studies import section_of, write_comparison, write_plan, write_run, write_sweep

from pfedlms.cli.stored import sections_of
from pfedlms.errors import UsageError
from pfedlms.methods import METHODS
from pfedlms.report import charts, figures
from pfedlms.report.charts import Look, looks
from pfedlms.report.results import comparison
from pfedlms.report.runs import best_combination, curves, gains


def test_rounds_without_values_of_all_seeds_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", [50, None, 70], kib=1)
    write_run(tmp_path / "b", "fedavg", [60, 65], seed=1, kib=1, settings={"train": {"rounds": 3}})
    assert [(each["round"], each["mean"]) for each in curves(section_of(tmp_path).runs)["fedavg"]] == [(1, 55.0)]


def test_gains_are_of_the_same_client_with_the_same_seed(tmp_path: Path) -> None:
    gained = gains(section_of(write_comparison(tmp_path / "c")).runs)
    assert list(gained) == ["fedavg", "stc"]
    assert [(each["client"], each["seed"], each["gain"]) for each in gained["fedavg"]] == [
        ("client 0", 0, 30.0), ("client 1", 0, 0.0), ("client 0", 1, 30.0), ("client 1", 1, 0.0)
    ]  # fmt: skip
    assert [each["gain"] for each in gained["stc"]] == [-5.0, 20.0, -5.0, 20.0]


def test_gains_are_over_local_with_the_same_training(tmp_path: Path) -> None:
    """Two learning rates: each row against `local` at its own, 50 and 90; where there is none, the first."""
    made: dict[str, tuple[str, str]] = {}
    for rate, alone in ((0.1, 50.0), (0.3, 90.0)):
        own = {"train": {"learning_rate": rate}}
        for method, reached in (("local", alone), ("fedavg", 95.0)):
            folder = f"{method}{rate}"
            run = write_run(tmp_path / folder, method, [reached], clients=(reached,), settings=own)
            made[folder] = (folder, run)
    other = write_run(tmp_path / "o", "fedavg", [95.0], clients=(95.0,), settings={"train": {"learning_rate": 0.2}})
    write_plan(tmp_path, {**made, "o": ("o", other)})
    gained = {row: [each["gain"] for each in own] for row, own in gains(section_of(tmp_path).runs).items()}
    assert gained == {"fedavg0.1": [45.0], "fedavg0.3": [5.0], "o": [45.0]}


@pytest.mark.parametrize(
    ("settings", "seed", "found"),
    [({}, 0, 1), ({}, 3, 0), ({"data": {"alpha": 0.1}}, 0, 0), ({"data": {"dir": "elsewhere"}}, 0, 1)],
)
def test_gains_are_over_a_local_run_of_another_section(
    settings: dict[str, dict[str, float]], seed: int, found: int, tmp_path: Path
) -> None:
    write_run(tmp_path / "study" / "l", "local", [60.0])
    alone = write_run(tmp_path / "study" / "m", "local", [60.0], seed=9)
    write_plan(tmp_path / "study", {"l": ("local", alone), "m": ("local", alone)})
    write_run(tmp_path / "mine", "fedavg", [70.0], seed=seed, kib=1, settings=settings)
    sections, _ = sections_of([tmp_path])
    mine = next(section for section in sections if section.kind == "Runs")
    assert len(gains(mine.runs, [run for section in sections for run in section.runs])) == found


def test_the_best_finished_run_of_a_sweep_has_the_star(tmp_path: Path) -> None:
    axes = {"learning_rate": [0.1, 1.0], "batch_size": [8, 16]}
    section = section_of(write_sweep(tmp_path / "s", axes, [70.0, 71.0, 90.0, 99.0], interrupted=[99.0]))
    top = best_combination(section)
    assert (top.label, top.settings) == (
        "learning_rate=1.0 batch_size=8",
        {"train.learning_rate": 1.0, "train.batch_size": 8},
    )
    figure = figures.by_setting(section, "a title")
    assert figure.title == "P-acc, % by train.learning_rate"
    assert tuple(figure.records[0]) == ("train.learning_rate", "train.batch_size", "mean", "low", "high")
    assert tuple(figure.records[0].values()) == (0.1, 8, 70.0, 70.0, 70.0)
    spec = figure.chart.to_dict()
    assert spec["title"] == "a title"
    starred = [own for layer in spec["layer"][-2:] for own in layer["data"]["values"]]
    assert {(own["x"], own["mean"], own["shown"]) for own in starred} == {(1.0, 90.0, "90.00 %")}
    assert spec["layer"][1]["encoding"]["x"]["scale"]["type"] == "log", "ten times from the first value to the last"


def test_every_method_of_a_sweep_has_a_line(tmp_path: Path) -> None:
    made = {}
    for at, (method, rate) in enumerate(product(["fedavg", "fedavg:server_step=2", "local"], [0.1, 0.2])):
        name, own = method.partition(":")[0], {"train": {"learning_rate": rate}}
        config = write_run(tmp_path / f"r{at}", name, [50.0 + at], kib=1, settings=own)
        made[f"r{at}"] = (f"{method} learning_rate={rate}", config)
    write_plan(tmp_path, made, axes={"train.learning_rate": [0.1, 0.2]})
    figure = figures.by_setting(section_of(tmp_path))
    lines = {(own["row"], own["x"], own["mean"]) for own in figure.chart.to_dict()["data"]["values"]}
    assert lines == {
        ("fedavg", 0.1, 50.0), ("fedavg", 0.2, 51.0), ("fedavg:server_step=2", 0.1, 52.0),
        ("fedavg:server_step=2", 0.2, 53.0), ("local", 0.1, 54.0), ("local", 0.2, 55.0),
    }  # fmt: skip
    assert [own["method"] for own in figure.records[::2]] == ["fedavg", "fedavg:server_step=2", "local"]


def test_single_runs_are_labelled_by_settings_and_folders(tmp_path: Path) -> None:
    for folder, rate, seed in (("a", 0.1, 0), ("b", 0.2, 0), ("c", 0.2, 1), ("d", 0.2, 1)):
        write_run(tmp_path / folder, "fedavg", [70], seed=seed, kib=1, settings={"train": {"learning_rate": rate}})
    write_run(tmp_path / "e", "local", [70])
    write_run(tmp_path / "f", "local", [70], settings={"data": {"alpha": 0.1}})
    first, second = sections_of([tmp_path])[0]
    assert [run.label for run in first.runs] == [
        "fedavg learning_rate=0.1", "fedavg learning_rate=0.2", "fedavg learning_rate=0.2",
        "fedavg learning_rate=0.2 (d)", "local",
    ]  # fmt: skip
    assert [run.label for run in second.runs] == ["local"]
    assert (first.title, second.title) == ("digits · dnn · alpha 0.5", "digits · dnn · alpha 0.1")


def test_folders_are_read_once_and_named_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_comparison(tmp_path / "all" / "deep" / "study")
    write_run(tmp_path / "all" / "run", "local", [70])
    monkeypatch.chdir(tmp_path)
    sections, _ = sections_of(["all", tmp_path / "all" / "run", "all/deep/study"])
    assert [section.title for section in sections] == ["study", "digits · dnn"]
    assert [len(section.runs) for section in sections] == [6, 1]
    assert str(sections[0].runs[0].directory) == "all/deep/study/l0"


def test_unreadable_folders_are_left_out_and_named(tmp_path: Path) -> None:
    for folder in ("good", "empty"):
        write_run(tmp_path / folder, "local", [70])
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    (tmp_path / "empty" / "summary.json").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("schema = 99\n")
    with pytest.warns(UserWarning, match="left out") as warned:
        sections, left_out = sections_of([tmp_path])
    assert len(sections[0].runs) == 1
    assert len(warned) == len(left_out) == 2
    assert "no evaluation yet" in left_out[0]
    assert [reason.split(":")[0] for reason in left_out] == [str(tmp_path / name) for name in ("empty", "other")]
    own_config = (tmp_path / "good" / "config.toml").read_text()
    (tmp_path / "good" / "config.toml").write_text(own_config.replace('name = "local"', 'name = "not_imported"'))
    with pytest.raises(UsageError), pytest.warns(UserWarning, match="good: .*not_imported"):
        sections_of([tmp_path / "good"])
    write_comparison(tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun" / "l0")
    with pytest.warns(UserWarning, match="begun/l0: this run has not begun"):
        sections_of([tmp_path / "begun"])


def test_a_method_has_the_same_look_in_every_figure() -> None:
    names = ["local", "fedavg", *(f"pfedlms:ratio=0.{k}" for k in range(20))]
    found = looks(names)
    assert list(found) == names
    assert len({(look.colour, *look.dash) for look in found.values()}) == len(names)
    for name in ("local", "fedavg"):
        assert looks([name])[name] == found[name] == looks(reversed(names))[name]
    everyone = looks(METHODS)
    assert len({(look.colour, *look.dash) for look in everyone.values()}) == len(METHODS)
    assert len(looks(str(k) for k in range(100))) == 100
    first = looks(["sketchvote", "fedavg", "pfedlms", "stc", "sketchmean", "eden", "pfed1bs", "local"])
    assert list(first.values()) == [Look(colour) for colour in charts.COLOURS], "a colour each, and solid lines"
    assert Look.number(9) == Look(charts.COLOURS[1], [6, 3])


# Machado, Oliveira, Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009: linear
# RGB as seen without deviation, and without the receptors for green, red and blue.
VISION = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
# Björn Ottosson's OKLab, in which distances are as large as they look.
LMS = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", [charts.LIGHT, charts.DARK], ids=["light", "dark"])
def test_any_two_colours_differ_for_every_kind_of_vision(palette: dict[str, str], vision: str) -> None:
    shown = np.array([[int(palette[f"c{k}"][at : at + 2], 16) / 255 for at in (1, 3, 5)] for k in range(8)])
    linear = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    seen = np.cbrt((linear @ np.array(VISION[vision]).T).clip(0, 1) @ np.array(LMS).T) @ np.array(LAB).T
    apart = np.linalg.norm(seen[:, None] - seen[None], axis=2)[~np.eye(8, dtype=bool)]
    assert apart.min() > (0.14 if vision == "all" else 0.09)
    assert charts.LIGHT.keys() == charts.DARK.keys()


def test_a_figure_is_saved_in_every_format(tmp_path: Path) -> None:
    runs = section_of(write_comparison(tmp_path / "c")).runs
    figure = figures.accuracy_curves(runs, against="bytes", title="digits · 2 clients")
    cost = figures.cost(comparison(runs), looks(["local", "fedavg", "stc"]))
    assert cost.records[1] == {"row": "fedavg", "mib_up": 1.0, "mib_down": 1.0, "total_bytes": 4 * 1024**2}
    assert figure.csv().splitlines()[:2] == ["row,round,mib,mean,low,high", "fedavg,1,1.0,70.0,70.0,70.0"]
    begins = {".png": b"\x89PNG", ".pdf": b"%PDF", ".html": b"<!DOCTYPE html>", ".json": b"{"}
    for suffix, start in begins.items():
        figure.save(tmp_path / f"f{suffix}")
        assert (tmp_path / f"f{suffix}").read_bytes().startswith(start)
    figure.save(tmp_path / "new" / "f.svg")
    root = ElementTree.parse(tmp_path / "new" / "f.svg").getroot()
    shown = [text for each in root.iter() if (text := (each.text or "").strip())]
    assert {"digits · 2 clients", "P-acc, %", "fedavg", "stc", "local (sends nothing)"} <= set(shown)
    colours = {each.get("stroke") for each in root.iter()}
    assert {look.colour for look in looks(["fedavg", "stc", "local"]).values()} <= colours
    with pytest.raises(UsageError, match="expected a .png, .svg, .pdf, .html or .json file".replace(".", r"\.")):
        figure.save(tmp_path / "f.xyz")


HOLDINGS = {
    "dataset": "digits", "partition": "dirichlet", "alpha": 0.5, "classes": ["0", "1"],
    "clients": [{"name": "a", "classes": [3, 0], "train": 2, "test": 1}, {"name": "b", "classes": [1, 9], "train": 7,
                                                                         "test": 3}],
}  # fmt: skip


def test_the_map_of_clients_and_classes_has_counts(tmp_path: Path) -> None:
    figures.client_map(HOLDINGS).save(tmp_path / "f.svg")
    root = ElementTree.parse(tmp_path / "f.svg").getroot()
    assert {"digits · 2 clients · dirichlet, α = 0.5", "9", "train"} <= {
        (each.text or "").strip() for each in root.iter()
    }


def test_the_first_values_of_a_curve_do_not_set_its_range() -> None:
    """Of twenty values the first two are not counted."""
    values = [0.0, 1.0, 90.0, *[95.0] * 16, 100.0]
    points = [{"row": "a", "x": x, "mean": own, "low": own, "high": own} for x, own in enumerate(values)]
    low, high = charts.value_range(points)
    assert (low, high) == pytest.approx((90 - 0.6, 100 + 0.6))
    assert charts.value_range(points[-1:]) == pytest.approx((95, 105))
