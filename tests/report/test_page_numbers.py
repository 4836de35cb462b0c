"""What a page is made of, against numbers worked out by hand."""

from __future__ import annotations

import doctest
import json
import shutil
import warnings
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from studies import a_comparison, a_run, compared

import pfedlms
from pfedlms.errors import RunDirectoryError
from pfedlms.report.page import svg
from pfedlms.report.page.gather import gather
from pfedlms.report.page.layers import layers_of
from pfedlms.report.page.measures import Spread, best, cells, curves, gains, headline
from pfedlms.report.page.svg import Scale, linear_ticks, looks, spread_out

SMALL = {"rounds": 2, "clients": 4, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1, "progress": False}


def test_the_headline_of_a_comparison(tmp_path: Path) -> None:
    (part,) = gather([compared(tmp_path / "c")]).parts
    local, fedavg, stc = headline(part)
    assert [local.name, fedavg.name, stc.name] == ["local", "fedavg", "stc"]
    assert fedavg.accuracies["P-acc max"] == Spread(81.0, sqrt(2))  # 80 and 82
    assert fedavg.accuracies["P-acc last"].mean == 75.5  # (70 + 80) / 2 and (70 + 82) / 2
    assert fedavg.accuracies["G-acc max"].mean is None, "the summaries made by hand have none"
    assert (fedavg.up, fedavg.down, fedavg.total) == (1.0, 1.0, 4.0)
    assert (local.fewer, fedavg.fewer, stc.fewer) == (None, 1.0, 16.0)
    assert (stc.rounds, stc.seeds, stc.note) == (2, 2, "")


def test_curves_are_means_with_ranges_over_seeds(tmp_path: Path) -> None:
    (part,) = gather([compared(tmp_path / "c")]).parts
    local, fedavg, _ = curves(part)
    assert (local.rounds, local.middle, local.low, local.high) == ([1, 2], [50.5, 60.5], [50, 60], [51, 61])
    assert fedavg.mib == [1.0, 2.0]  # 2 MiB a round of two clients
    assert [curve.name for curve in curves(part, "g_acc")] == ["fedavg"]


def test_rounds_that_a_seed_did_not_measure_are_left_out(tmp_path: Path) -> None:
    one = a_run(tmp_path / "a", "fedavg", [50, None, 70], kib=1)
    two = a_run(tmp_path / "b", "fedavg", [60, 65], seed=1, kib=1, settings={"train": {"rounds": 3}})
    a_comparison(tmp_path, {"a": ("fedavg", one), "b": ("fedavg", two)})
    (curve,) = curves(gather([tmp_path]).parts[0])
    assert (curve.rounds, curve.middle) == ([1], [55.0])


def test_gains_are_of_the_same_client_with_the_same_seed(tmp_path: Path) -> None:
    found = gather([compared(tmp_path / "c")])
    gained = gains(found.parts[0], found)
    assert list(gained) == ["fedavg", "stc"]
    assert [(each.client, each.seed, each.gain) for each in gained["fedavg"]] == [
        ("client 0", 0, 30.0), ("client 1", 0, 0.0), ("client 0", 1, 30.0), ("client 1", 1, 0.0)
    ]  # fmt: skip
    assert [each.gain for each in gained["stc"]] == [-5.0, 20.0, -5.0, 20.0]


def test_gains_are_over_local_that_trains_alike(tmp_path: Path) -> None:
    """Two rates of learning: each row against `local` at its own, 50 and 90; where there is none, the first."""
    made: dict[str, tuple[str, str]] = {}
    for rate, alone in ((0.1, 50.0), (0.3, 90.0)):
        own = {"train": {"learning_rate": rate}}
        for method, reached in (("local", alone), ("fedavg", 95.0)):
            folder = f"{method}{rate}"
            run = a_run(tmp_path / folder, method, [reached], clients=(reached,), settings=own)
            made[folder] = (folder, run)
    other = a_run(tmp_path / "o", "fedavg", [95.0], clients=(95.0,), settings={"train": {"learning_rate": 0.2}})
    a_comparison(tmp_path, {**made, "o": ("o", other)})
    found = gather([tmp_path])
    gained = {name: [each.gain for each in own] for name, own in gains(found.parts[0], found).items()}
    assert gained == {"fedavg0.1": [45.0], "fedavg0.3": [5.0], "o": [45.0]}


@pytest.mark.parametrize(
    ("settings", "seed", "found"),
    [({}, 0, 1), ({}, 3, 0), ({"data": {"alpha": 0.1}}, 0, 0), ({"data": {"dir": "elsewhere"}}, 0, 1)],
)
def test_local_is_looked_for_on_the_whole_page(
    settings: dict[str, dict[str, float]], seed: int, found: int, tmp_path: Path
) -> None:
    a_run(tmp_path / "study" / "l", "local", [60.0])
    alone = a_run(tmp_path / "study" / "m", "local", [60.0], seed=9)
    a_comparison(tmp_path / "study", {"l": ("local", alone), "m": ("local", alone)})
    a_run(tmp_path / "mine", "fedavg", [70.0], seed=seed, kib=1, settings=settings)
    gathered = gather([tmp_path])
    mine = next(part for part in gathered.parts if part.kind == "runs")
    assert len(gains(mine, gathered)) == found


def test_runs_by_themselves_are_told_apart_by_settings_and_folders(tmp_path: Path) -> None:
    for folder, rate, seed in (("a", 0.1, 0), ("b", 0.2, 0), ("c", 0.2, 1), ("d", 0.2, 1)):
        a_run(tmp_path / folder, "fedavg", [70], seed=seed, kib=1, settings={"train": {"learning_rate": rate}})
    a_run(tmp_path / "e", "local", [70])
    a_run(tmp_path / "f", "local", [70], settings={"data": {"alpha": 0.1}})
    first, second = gather([tmp_path]).parts
    names = [run.name for run in first.runs]
    assert names == [
        "fedavg learning_rate=0.1", "fedavg learning_rate=0.2", "fedavg learning_rate=0.2",
        "fedavg learning_rate=0.2 (d)", "local",
    ]  # fmt: skip
    assert [run.name for run in second.runs] == ["local"]
    assert (first.title, second.title) == ("digits · dnn · alpha 0.5", "digits · dnn · alpha 0.1")


def test_folders_are_taken_apart_and_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(tmp_path / "all" / "deep" / "study")
    a_run(tmp_path / "all" / "run", "local", [70])
    monkeypatch.chdir(tmp_path)
    gathered = gather(["all", tmp_path / "all" / "run", "all/deep/study"])
    assert [part.title for part in gathered.parts] == ["study", "digits · dnn"]
    assert len(gathered.runs) == 7
    assert str(gathered.runs[0].directory) == "all/deep/study/l0", "as it was given, not where this machine has it"


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    a_run(tmp_path / "good", "local", [70])
    a_run(tmp_path / "empty", "local", [70])
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("schema = 99\n")
    with pytest.warns(UserWarning, match="left out") as told:
        gathered = gather([tmp_path])
    assert len(gathered.runs) == 1
    assert len(told) == len(gathered.left_out) == 2
    assert "no evaluation yet" in gathered.left_out[0]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run with an evaluation"):
        gather([tmp_path])
    with pytest.raises(RunDirectoryError, match="there is no such folder"):
        gather([tmp_path / "none"])


def test_unfinished_runs_do_not_enter_the_means_of_finished_ones(tmp_path: Path) -> None:
    good = a_run(tmp_path / "a", "fedavg", [70], kib=1)
    bad = a_run(tmp_path / "b", "fedavg", [10], seed=1, kib=1, status="diverged")
    worse = a_run(tmp_path / "c", "stc", [20], kib=1, status="interrupted")
    a_comparison(tmp_path, {"a": ("fedavg", good), "b": ("fedavg", bad), "c": ("stc", worse)})
    fedavg, stc = headline(gather([tmp_path]).parts[0])
    assert (fedavg.accuracies["P-acc max"], fedavg.note) == (Spread(70), "1 of 2 seeds")
    assert (stc.accuracies["P-acc max"], stc.note) == (Spread(20), "interrupted")


def test_the_best_of_a_sweep(tmp_path: Path) -> None:
    made = {}
    for at, (rate, reached) in enumerate(((0.1, 70.0), (0.2, 90.0), (0.3, 99.0))):
        status = "finished" if at < 2 else "interrupted"
        config = a_run(tmp_path / f"r{at}", "fedavg", [reached], settings={"train": {"learning_rate": rate}},
                       status=status)  # fmt: skip
        made[f"r{at}"] = (f"learning_rate={rate}", config)
    a_comparison(tmp_path, made, "sweep.json", axes={"train.learning_rate": [0.1, 0.2, 0.3]}, by="p_acc")
    (part,) = gather([tmp_path]).parts
    assert best(part) == "learning_rate=0.2"
    assert cells(part)[0] == ("learning_rate=0.1", {"train.learning_rate": 0.1}, [70.0])


def test_layers_are_what_clients_would_send_next(tmp_path: Path) -> None:
    """Against Φ as a matrix, applied to the models that were kept, with statistics and thresholds in NumPy."""
    result = pfedlms.run(method="pfedlms", out=tmp_path / "r", thresholds=3, ratio=0.5, **SMALL)
    (run,) = gather([tmp_path / "r"]).runs
    layers, missing = layers_of(run)
    assert not missing
    sizes = [64 * 12 + 12, 12 * 10 + 10]
    assert [layer.size for layer in layers] == sizes
    method = result.federation.method
    sketch = method._sketches.of(2, torch.device("cpu"))
    models = torch.stack([torch.cat([value.flatten() for value in model.values()]) for model in result.models])
    sketched = sketch.forward(models).double().numpy()
    weights = np.array(result.federation.data.samples, dtype=np.float64)
    start = offset = 0
    for layer in layers:
        own = sketched[:, start : start + layer.sketched]
        mean = np.average(own.mean(axis=1), weights=weights)
        spread = np.sqrt(np.average(own.var(axis=1) + (own.mean(axis=1) - mean) ** 2, weights=weights))
        np.testing.assert_allclose(layer.thresholds, mean + spread * np.array([-0.6744898, 0, 0.6744898]), rtol=1e-4)
        chosen = np.searchsorted(np.float32(layer.thresholds), np.float32(own).ravel(), side="right")
        np.testing.assert_allclose(layer.symbols, np.bincount(chosen, minlength=4) / chosen.size)
        held = models[:, offset : offset + layer.size].numpy()
        inside = np.histogram(held, layer.weights.edges)[0] / held.size
        np.testing.assert_allclose(layer.weights.shares[1:-1], inside[1:-1], atol=1e-6)
        assert layer.sketch.shares.sum() == pytest.approx(1)
        start, offset = start + layer.sketched, offset + layer.size


def test_layers_of_many_clients_are_the_same_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pfedlms.run(method="pfedlms", out=tmp_path / "r", **SMALL)
    (run,) = gather([tmp_path / "r"]).runs
    at_once, _ = layers_of(run)
    monkeypatch.setattr("pfedlms.report.page.layers._AT_ONCE", 3)
    in_groups, _ = layers_of(run)
    for one, two in zip(at_once, in_groups, strict=True):
        assert (one.thresholds, one.symbols) == (two.thresholds, two.symbols)
        np.testing.assert_array_equal(one.sketch.shares, two.sketch.shares)


def test_why_there_are_no_layers(tmp_path: Path) -> None:
    pfedlms.run(method="pfedlms", out=tmp_path / "r", **SMALL)
    pfedlms.run(method="local", out=tmp_path / "l", **SMALL)
    (tmp_path / "r" / "checkpoint.pt").unlink()
    for folder, reason in (("l", "local has no thresholds"), ("r", "no checkpoint.pt")):
        (run,) = gather([tmp_path / folder]).runs
        layers, missing = layers_of(run)
        assert layers == []
        assert reason in missing


def test_summaries_tell_the_environment_and_stages_only_where_profiled(tmp_path: Path) -> None:
    from pfedlms.cli import main

    small = [part for key, value in (("data.clients", 4), ("model.hidden", 12), ("train.local_steps", 2))
             for part in ("--set", f"{key}={value}")]  # fmt: skip
    for name, more in (("plain", []), ("profiled", ["--profile"])):
        assert main(["run", "--rounds", "1", *small, "--out", str(tmp_path / name), "--quiet", *more]) == 0
    plain, profiled = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("plain", "profiled"))
    assert plain["environment"]["torch"] == torch.__version__
    assert plain["environment"]["device"] == ("cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert "stages" not in plain
    assert profiled["stages"]["local steps"] > 0
    before = (tmp_path / "profiled" / "summary.json").read_bytes()
    pfedlms.resume(tmp_path / "profiled", progress=False)
    assert (tmp_path / "profiled" / "summary.json").read_bytes() == before


def test_summaries_of_before_environments_were_told_stay_as_they_are(tmp_path: Path) -> None:
    pfedlms.run(method="local", out=tmp_path / "r", **SMALL)
    file = tmp_path / "r" / "summary.json"
    old = {key: value for key, value in json.loads(file.read_text()).items() if key != "environment"}
    file.write_text(json.dumps(old))
    pfedlms.resume(tmp_path / "r", progress=False)
    assert json.loads(file.read_text()) == old


# --- drawing ---


def test_scales_and_ticks() -> None:
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(0.01, 100, 0, 400, log=True)(1) == pytest.approx(200)
    assert Scale(0.01, 100, 0, 400, log=True).ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert Scale(1, 10, 0, 1, log=True).ticks() == pytest.approx([1, 2, 5, 10])
    assert linear_ticks(86.9, 99.1, 8) == [88, 90, 92, 94, 96, 98]
    assert linear_ticks(-0.3, 0.3, 4) == [-0.2, 0, 0.2]
    assert linear_ticks(5, 5) == [5]
    assert Scale(5, 5, 0, 10)(5) == 5


def test_the_examples_of_pieces_run() -> None:
    assert doctest.testmod(svg) == (0, 3)


def test_labels_keep_their_order_and_distance() -> None:
    placed = spread_out([50, 10, 51, 52], 15, 0, 200)
    assert placed == pytest.approx([36, 10, 51, 66])
    assert spread_out([95, 96], 15, 0, 100) == pytest.approx([85, 100])
    assert spread_out([], 15, 0, 100) == []


def test_every_row_has_a_look_of_its_own() -> None:
    names = ["local", "fedavg", *(f"pfedlms:ratio=0.{k}" for k in range(20))]
    found = looks(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert found["local"] == looks(["local"])["local"], "the same on every page"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(looks(str(k) for k in range(100))) == 100


def test_old_folders_without_newer_fields(tmp_path: Path) -> None:
    a_run(tmp_path / "r", "fedavg", [70, 80], kib=1024)
    shutil.copytree(tmp_path / "r", tmp_path / "new")
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    for key in ("evaluations", "participation", "everyone", "rejected", "parameters"):
        summary.pop(key)
    summary["bytes_per_round"].pop("catch_up")
    (tmp_path / "r" / "summary.json").write_text(json.dumps(summary))
    (row,) = headline(gather([tmp_path / "r"]).parts[0])
    (same,) = headline(gather([tmp_path / "new"]).parts[0])
    assert (row.accuracies, row.up, row.total) == (same.accuracies, same.up, same.total)
