"""Comparisons: variants of a method, settings of single methods, stored results. Sweeps: scores, the best value, and
warnings if it is the largest or smallest."""

from __future__ import annotations

import csv
import errno
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import OPTIONS, SMALL, SendSignal, edit_config
from torch import nn

import pfedlms
from pfedlms import files, rng
from pfedlms.cli import main
from pfedlms.errors import ConfigError, PfedlmsError, RunDirectoryError, StorageError, UsageError
from pfedlms.experiment import studies
from pfedlms.experiment.grids import grid_rows, plan_study


def planned_configs(methods: Any, overrides: dict[str, Any] | None = None, file: Path | None = None) -> dict[str, Any]:
    rows, axes = grid_rows({"method": methods})
    return {each.label: each.config for each in plan_study(file, overrides or {}, rows, axes).planned}


@pytest.mark.parametrize(
    "methods",
    [
        "pfedlms, pfedlms:thresholds=1 ,fedavg:server_step=2:learning_rate=.05",
        ("pfedlms", "pfedlms:thresholds=1,fedavg:server_step=2:train.learning_rate=.05"),
        iter(["pfedlms", ("pfedlms", {"thresholds": 1}), ["fedavg", {"server_step": 2, "learning_rate": 0.05}]]),
    ],
)
def test_a_variant_has_a_name_and_settings_of_its_own(methods: Any) -> None:
    configs = planned_configs(methods, {"method": {"thresholds": 3}, "train": {"learning_rate": 0.2}})
    first, second, third = configs.values()
    assert [first.method, second.method, third.method] == ["pfedlms", "pfedlms", "fedavg"]
    assert (first.settings.thresholds, second.settings.thresholds) == (3, 1)  # the variant's own value wins
    assert third.settings.server_step == 2.0
    assert [config.train.learning_rate for config in configs.values()] == [0.2, 0.2, 0.05]
    assert list(configs)[:2] == ["pfedlms", "pfedlms:thresholds=1"]


def test_a_setting_that_several_methods_have_must_name_its_method(tmp_path: Path) -> None:
    methods = "local,pfedlms,pfed1bs"
    with pytest.raises(ConfigError, match=r"method\.strength: may mean pfedlms\.strength or pfed1bs\.strength"):
        planned_configs(methods, {"method": {"strength": 0.2}})
    named = planned_configs(methods, {"pfedlms": {"strength": 0.2}})
    assert named["pfedlms"].settings.strength == 0.2
    assert named["pfed1bs"].settings.strength == planned_configs("pfed1bs")["pfed1bs"].settings.strength != 0.2
    file = tmp_path / "one.toml"
    file.write_text('[method]\nname = "pfedlms"\nstrength = 0.3\n[pfed1bs]\nstrength = 0.4\n')
    from_file = planned_configs(methods, file=file)  # the file's [method] section is for the method it names
    assert (from_file["pfedlms"].settings.strength, from_file["pfed1bs"].settings.strength) == (0.3, 0.4)


def test_variants_have_separate_rows_folders_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    out = tmp_path / "c"
    methods = "pfedlms,pfedlms:thresholds=1,fedavg:server_step=2"
    assert main(["compare", "--methods", methods, "--seeds", "2", *OPTIONS, "--out", str(out), "--json", "--plot",
                 str(tmp_path / "p.svg")]) == 0  # fmt: skip
    assert "4 clients, α = 0.5 · 3 rounds" in (tmp_path / "p.svg").read_text()
    shown = capsys.readouterr()
    runs = json.loads(shown.out)["runs"]
    assert [run["name"] for run in runs] == [name for name in methods.split(",") for _ in range(2)]
    assert "pfedlms:thresholds=1 seed 1: 3 rounds on digits" in shown.err
    sent = {run["name"]: run["total_bytes"] for run in runs}
    assert 0 < sent["pfedlms:thresholds=1"] < sent["pfedlms"] < sent["fedavg:server_step=2"]
    folders = [Path(run["directory"]) for run in runs]
    assert folders[2] == out / "pfedlms-thresholds=1-seed0"
    for run, folder in zip(runs, folders, strict=True):
        stored = json.loads((folder / "summary.json").read_text())
        assert {**stored, "name": run["name"], "directory": run["directory"]} == run

    document = json.loads((out / "results.json").read_text())
    assert document["settings"]["data.clients"] == 4
    assert "method.thresholds" not in document["settings"]
    assert [row["settings"].get("method.thresholds") for row in document["runs"]] == [7, 7, 1, 1, None, None]
    assert [row["directory"] for row in document["runs"]] == [folder.name for folder in folders]
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method.server_step"] for row in rows] == ["", "", "", "", "2.0", "2.0"]
    for row, run in zip(rows, runs, strict=True):
        assert all(row[key] == str(run[key]) for key in ("name", "seed", "total_bytes"))
        assert float(row["p_acc_last10"]) == run["accuracy"]["last10"]
        assert row["v_acc_max"] == ""


def test_models_that_would_fill_the_memory_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "_MAX_MODEL_BYTES", 1000)
    comparison = pfedlms.compare(methods="local", seeds=1, **SMALL)
    assert comparison.runs[0].metrics
    with pytest.raises(UsageError, match="give out=DIR"):
        _ = comparison.runs[0].models


@pytest.mark.parametrize("file", ["fedavg-seed1/checkpoint.pt", "results.csv"])
def test_a_full_disk_message_names_the_comparison(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For PyTorch's writer, which raises another error, and for the last file."""
    out = tmp_path / "c"
    write = files._RawFile.write

    def fail_to_write(self: Any, data: Any) -> int:
        if file in str(self.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(files._RawFile, "write", fail_to_write)
    with pytest.raises(StorageError, match=rf"cannot write \(No space left on device\); .* resume {out}`"):
        pfedlms.compare(methods="fedavg", seeds=2, out=out, **SMALL)
    monkeypatch.undo()
    assert main(["resume", str(out), "--quiet"]) == 0
    assert not list(out.rglob("*.tmp"))
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 2


DIVERGING_SEED = 1


def diverging_with_one_seed() -> nn.Module:
    """Weights that a huge weight decay multiplies by −11 in every step; those of one seed start at 3 · 10³⁰."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    if torch.initial_seed() == rng.stream(DIVERGING_SEED, "initial") % (1 << 63):
        nn.init.constant_(module[1].weight, 3e30)
    return module


def test_a_seed_that_diverges_does_not_end_the_other_runs() -> None:
    options = {**SMALL, "learning_rate": 1.0, "weight_decay": 12.0, "rounds": 4}
    with pytest.warns(UserWarning, match=f"seed {DIVERGING_SEED} diverged: round 3"):
        runs = pfedlms.compare("digits", diverging_with_one_seed, methods=["fedavg"], seeds=3, **options).summaries
    ends = [(run["seed"], run["status"], run["rounds"]) for run in runs]
    assert ends == [(0, "finished", 4), (1, "diverged", 2), (2, "finished", 4)]


@pytest.mark.parametrize("broken", ["checkpoint.pt", "config.toml"])
def test_a_run_that_cannot_be_resumed_leaves_no_folder_locked(broken: str, tmp_path: Path) -> None:
    """A broken config is found when the study is opened, a broken checkpoint when the run starts."""
    out = tmp_path / "c"
    options = {**SMALL, "learning_rate": 0.1}
    with pytest.raises(KeyboardInterrupt):
        pfedlms.compare(methods=["fedavg"], seeds=3, out=out, callbacks=[SendSignal(1, of=1)], **options)
    file = out / "fedavg-seed1" / broken
    file.write_bytes(file.read_bytes().replace(b"learning_rate = 0.1", b"learning_rate = 0.2")[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(RunDirectoryError) as caught:
            studies.load_study(out).train()
        open_files = [file for file in Path("/proc/self/fd").iterdir() if str(file.resolve()).startswith(str(out))]
        del caught  # it references the runs
    assert not open_files


def test_a_run_is_not_trained_on_the_data_of_other_runs(tmp_path: Path) -> None:
    """A folder whose config.toml was changed before it began must not be trained on the others' samples."""
    pfedlms.compare("digits", methods=["local"], seeds=2, rounds=1, clients=3, out=tmp_path / "c")
    folder = tmp_path / "c" / "local-seed1"
    for name in ("checkpoint.pt", "metrics.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)
    edit_config(folder, 'dataset = "digits"', 'dataset = "mnist"')
    with pytest.raises(PfedlmsError, match="mnist"):
        studies.load_study(tmp_path / "c").train()


def test_a_best_value_at_the_edge_of_three_or_more_is_warned_about() -> None:
    """The middle of three rates is best by far; one of two values is always at an edge."""
    with pytest.warns(UserWarning, match=r"the best train\.learning_rate is 0\.2, the largest tried; try larger"):
        pfedlms.sweep(method="local", learning_rate=[1e-5, 1e-4, 0.2], validation=0.2, **SMALL)
    with pytest.warns(UserWarning, match=r"chosen by p_acc on test samples.*data\.validation"):
        assert pfedlms.sweep(method="local", learning_rate=np.array([0.1, 0.2]), **SMALL).by == "p_acc"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pfedlms.sweep(method="local", learning_rate=[1e-5, 0.2], validation=0.2, **SMALL)
        pfedlms.sweep(method="local", learning_rate=[1e-5, 0.2, 400.0], validation=0.2, **SMALL)
        pfedlms.sweep(method="zsign", downlink=["model", "sum"], validation=0.2, **SMALL)


def test_no_edge_is_warned_about_at_the_bound_of_a_setting() -> None:
    """Zero weight decay is better than huge ones, and ratio 1 is better than small ones; no values lie beyond these."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = {**SMALL, "rounds": 8, "learning_rate": 0.3, "validation": 0.2}
        decays = pfedlms.sweep(method="local", weight_decay=[3.0, 0.0, 2.0], **settings)
        ratios = pfedlms.sweep(method="sketchvote", ratio=[1.0, 0.01, 0.02], **settings)
    assert decays.best()["settings"] == {"train.weight_decay": 0.0}
    assert ratios.best()["settings"] == {"method.ratio": 1.0}
    with pytest.warns(UserWarning, match=r"weight_decay is 0\.001, the smallest tried; try smaller"):
        pfedlms.sweep(method="local", weight_decay=[3.0, 0.001, 2.0], **settings)


def test_the_sweep_command_prints_stores_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    out, picture = tmp_path / "s", tmp_path / "s.svg"
    command = ["sweep", "--method", "pfedlms", "--set", "method.ratio=.2,.3", "--set", "pfedlms.thresholds=1,3",
               "--learning-rate", ".001,.1", "--validation", ".2", *OPTIONS, "--out", str(out)]  # fmt: skip
    assert main([*command, "--plot", str(picture), "--quiet"]) == 0
    shown = capsys.readouterr()
    rows = [line for line in shown.out.splitlines() if re.match(r" ratio=0\.[23] thresholds=[13] ", line)]
    assert len(rows) == 8
    assert sum("best" in row for row in rows) == 1
    assert "pfedlms · digits · dnn, 910 parameters · 4 clients, α = 0.5" in picture.read_text()
    assert main(["resume", str(out), "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    axes = {"method.ratio": [0.2, 0.3], "method.thresholds": [1, 3], "train.learning_rate": [0.001, 0.1]}
    assert (document["axes"], document["by"]) == (axes, "v_acc")
    assert f"best by v_acc: {document['best']['name']}" in shown.err
    stored = json.loads((out / "results.json").read_text())
    assert [set(row["settings"]) for row in stored["runs"]] == [set(axes)] * 8
    scores = [row["validation_accuracy"]["last10"] for row in stored["runs"]]
    assert document["best"]["score"] == max(scores)
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out == shown.out
    assert main([*command, "--rounds", "9"]) == 2
    assert f"{out}: holds runs already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.learning_rate=.1,x"], "train.learning_rate: got 'x', expected a number"),
        (["--learning-rate", ","], "sweep: got no setting with several values"),
    ],
)
def test_wrong_sweep_commands_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_resumes_after_ctrl_c(tmp_path: Path) -> None:
    options = {"method": "local", "learning_rate": [0.01, 0.2, 400.0], "validation": 0.2, **SMALL}
    with pytest.raises(KeyboardInterrupt) as caught:
        pfedlms.sweep(out=tmp_path / "s", callbacks=[SendSignal(2, of="learning_rate=0.2 seed 0")], **options)
    stopped = caught.value.result
    assert stopped.interrupted
    assert [run["rounds"] for run in stopped.summaries] == [3, 2]
    with open(tmp_path / "s" / "results.csv") as file:
        rows = [(row["status"], row["train.learning_rate"]) for row in csv.DictReader(file)]
    assert rows == [("finished", "0.01"), ("interrupted", "0.2")]
    resumed = pfedlms.resume(tmp_path / "s")
    whole = pfedlms.sweep(**options)
    assert [cell["score"] for cell in resumed.cells()] == [cell["score"] for cell in whole.cells()]
    assert resumed.best()["name"] == whole.best()["name"]


def test_a_keyword_with_two_meanings_is_refused() -> None:
    """FetchSGD has a momentum of its own; it used to be taken without a word where `train.momentum` was meant."""
    meanings = r"momentum: may mean train\.momentum or method\.momentum; give the full name"
    for call in (
        lambda: pfedlms.run(method="fetchsgd", momentum=0.5),
        lambda: pfedlms.compare(methods=["fedavg", "fetchsgd"], momentum=0.5),
        lambda: pfedlms.study(grid={"method": ["fedavg", "fetchsgd"], "momentum": [0.1, 0.5]}),
    ):
        with pytest.raises(ConfigError, match=meanings):
            call()
    run = pfedlms.run(method="fetchsgd", **SMALL, **{"train.momentum": 0.5})
    assert (run.config.train.momentum, run.config.settings.momentum) == (0.5, 0.9)
    assert planned_configs("fetchsgd:momentum=0.3")["fetchsgd:momentum=0.3"].settings.momentum == 0.3


def test_two_values_for_one_setting_are_refused() -> None:
    for call in (pfedlms.run, pfedlms.compare):
        with pytest.raises(ConfigError, match="dataset: got 'mnist' beside data; give one of them"):
            call("digits", dataset="mnist", **SMALL)
    with pytest.raises(UsageError, match="method: got 'fedavg' beside methods of the grid"):
        pfedlms.compare(methods=["local"], method="fedavg", **SMALL)


def test_a_row_or_seed_that_is_given_twice_is_planned_once() -> None:
    rows, axes = grid_rows({"method": "local,fedavg,local", "learning_rate": np.array([0.1, 0.2, 0.1])})
    planned = plan_study(None, {}, rows, axes, seeds=[4, 2, 4]).planned
    assert axes == {"train.learning_rate": [0.1, 0.2]}
    labels = [f"{method} learning_rate={rate}" for method in ("local", "fedavg") for rate in (0.1, 0.2)]
    assert [(run.label, run.config.run.seed) for run in planned] == [(row, seed) for row in labels for seed in (4, 2)]
