"""`pfedlms.run`: its inputs and results, and which files remain when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small import same_models, stored_metrics
from torch import nn

import pfedlms
from pfedlms.backend import plain
from pfedlms.cli import main
from pfedlms.errors import DivergedError

QUICK = {"rounds": 3, "clients": 4, "local_steps": 3, "batch_size": 8, "threads": 1}
FEATURES, CLASSES = 6, 3


def pool(count: int, key: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(key)
    labels = np.arange(count) % CLASSES
    return draw.normal(size=(count, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[labels], labels


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.mark.parametrize(
    ("method", "factory"), [("pfedlms", with_batch_norm), ("fedavg", with_batch_norm), ("local", linear)]
)
def test_the_models_reach_the_accuracies_that_are_reported(method: str, factory: Any) -> None:
    pairs = [(pool(30 + key, key), pool(9 + key, 50 + key)) for key in range(4)]
    result = pfedlms.run(pairs, factory, method=method, rounds=4, local_steps=5, batch_size=8, threads=1)
    assert (result.summary["dataset"], result.summary["model"], result.summary["clients"]) == ("custom", "custom", 4)
    reported = result.metrics[-1]["client_acc"]
    correct = 0
    for state, (_, (x, y)), reported_accuracy in zip(result.models, pairs, reported, strict=True):
        module = factory()
        module.load_state_dict(state)
        with torch.no_grad():
            outputs = module.eval()(torch.as_tensor(x, dtype=torch.float32))
        reached = 100 * float((outputs.argmax(dim=1).numpy() == y).mean())
        assert reached == pytest.approx(reported_accuracy, abs=1e-9)
        correct += round(reached / 100 * len(y))
    assert result.metrics[-1]["p_acc"] == pytest.approx(100 * correct / sum(len(y) for _, (_, y) in pairs))
    assert result.metrics[-1]["p_acc"] > 50  # of three classes


def test_a_module_is_the_initial_model_and_is_not_changed() -> None:
    """With a learning rate of nearly zero every client ends with the parameters of the module."""
    module = with_batch_norm()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = pfedlms.run(pool(100), module, method="local", learning_rate=1e-30, weight_decay=0.0, **QUICK)
    for state in result.models:
        for name, _ in module.named_parameters():
            assert torch.allclose(state[name], before[name], rtol=0, atol=1e-25)
        assert not torch.equal(state["1.running_mean"], before["1.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_factory_draws_its_weights_from_the_seed_of_the_run() -> None:
    runs = [pfedlms.run(pool(100), linear, seed=seed, **QUICK) for seed in (0, 0, 1)]
    first, again, other = [run.federation.model.initial for run in runs]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_settings_and_the_method_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[method]\nname = "fedavg"\n[train]\nrounds = 5\nlocal_steps = 2\n')
    result = pfedlms.run(pool(100), linear, config=file, **{**QUICK, "rounds": 2})
    assert result.summary["method"] == "fedavg"
    assert result.summary["rounds"] == 2  # the keyword comes on top
    assert result.config.train.local_steps == 3
    assert pfedlms.run(pool(100), linear, config=file, method="local", **QUICK).summary["method"] == "local"


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_the_summary_agrees_with_the_metrics(method: str, tmp_path: Path) -> None:
    """Maximum, mean of the last ten and last by hand; bytes per round times rounds."""
    out = tmp_path / "run"
    result = pfedlms.run(pool(120), with_batch_norm, method=method, out=out, seed=7, **{**QUICK, "rounds": 13})
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    assert (result.summary, result.metrics, result.directory) == (summary, records, out)
    assert (summary["method"], summary["seed"], summary["clients"], summary["rounds"]) == (method, 7, 4, 13)
    assert summary["parameters"] == FEATURES * 8 + 8 + 2 * 8 + 8 * CLASSES + CLASSES

    reached = [record["p_acc"] for record in records]
    assert [record["round"] for record in records] == list(range(1, 14))
    expected = {"max": max(reached), "last10": pytest.approx(mean(reached[3:])), "final": reached[12]}
    assert summary["accuracy"] == expected
    assert summary["participation"] == 1
    assert summary["everyone"] == {
        "accuracy": reached[12], "test_loss": records[12]["test_loss"], "client_acc": records[12]["client_acc"],
        "mean_over_clients": pytest.approx(mean(records[12]["client_acc"])),
    }  # fmt: skip

    last = records[-1]["bytes"]
    parts = {"up_payload", "up_framing", "down_payload", "down_framing", "catch_up"}
    assert last.keys() == summary["bytes_per_round"].keys() == parts
    assert last["catch_up"] == 0  # no client was absent
    assert all(13 * summary["bytes_per_round"][key] == last[key] for key in last)
    assert summary["total_bytes"] == sum(last.values())
    assert all(last[key] == 13 * records[0]["bytes"][key] for key in last)
    for record in records:
        assert {"loss", "seconds"} <= record.keys()
        assert len(record["client_acc"]) == 4
        assert not record.keys() & {"clients", "unheard"}  # all clients took part, without dropouts
        assert ("g_acc" in record) == (method == "fedavg")


@pytest.mark.parametrize(("every", "evaluated"), [(2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_the_last_round_is_always_evaluated(every: int, evaluated: list[int]) -> None:
    result = pfedlms.run(pool(100), linear, method="fedavg", evaluate_every=every, **{**QUICK, "rounds": 5})
    assert [record["round"] for record in result.metrics] == evaluated
    assert all("g_acc" in record for record in result.metrics)


def test_more_evaluations_do_not_change_the_models() -> None:
    runs = [pfedlms.run(pool(100), with_batch_norm, evaluate_every=every, **QUICK) for every in (1, 3)]
    assert runs[0].metrics[-1]["client_acc"] == runs[1].metrics[-1]["client_acc"]
    assert same_models(runs[0].models, runs[1].models)


def test_a_run_restores_the_settings_of_the_process() -> None:
    cudnn = torch.backends.cudnn

    def process_settings() -> tuple[object, ...]:
        return torch.get_num_threads(), cudnn.benchmark, cudnn.deterministic

    before = process_settings()
    pfedlms.run(pool(100), linear, **{**QUICK, "threads": 2})
    assert process_settings() == before
    with pytest.raises(DivergedError):
        pfedlms.run(pool(100), linear, method="fedavg", learning_rate=1e30, **{**QUICK, "threads": 2})
    assert process_settings() == before


def test_the_reference_uses_no_kernels_and_trains_one_client_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Mock(side_effect=plain)
    monkeypatch.setattr("pfedlms.experiment.prepare.plain", recorder)
    assert pfedlms.run(pool(100), linear, **QUICK).federation.largest_cohort == 4
    assert not recorder.called
    assert pfedlms.run(pool(100), linear, reference=True, **QUICK).federation.largest_cohort == 1
    assert recorder.called


def test_only_training_samples_are_augmented() -> None:
    """With a learning rate of nearly zero all models stay the same, and so do their results on test samples."""
    settings = {**QUICK, "hidden": 16, "method": "fedavg", "learning_rate": 1e-30}
    plain_samples, augmented = (
        pfedlms.run(augment=augment, **settings).metrics[-1] for augment in ("none", "crop+flip")
    )
    assert augmented["loss"] != plain_samples["loss"]
    for key in ("p_acc", "g_acc", "test_loss"):
        assert augmented[key] == plain_samples[key]


def test_a_diverged_run_keeps_its_metrics(tmp_path: Path) -> None:
    """One client's samples are huge, and a learning rate of 2 doubles its model's error every step."""
    x, y = pool(40)
    pairs = [(pool(40, key), pool(9, 50 + key)) for key in range(3)]
    pairs[1] = ((x * 1e3, y), pool(9, 51))
    out = tmp_path / "run"
    settings = {"rounds": 50, "learning_rate": 2.0, "weight_decay": 10.0, "local_steps": 1, "threads": 1}
    with pytest.raises(DivergedError, match=r"round \d+: .* client \d ") as caught:
        pfedlms.run(pairs, linear, method="local", out=out, checkpoint_every=5, **settings)
    failed = int(str(caught.value).split(":")[0].removeprefix("round "))
    records = stored_metrics(out)
    summary = json.loads((out / "summary.json").read_text())
    assert 2 < failed < 50
    assert [record["round"] for record in records] == list(range(1, failed))
    assert (summary["status"], summary["rounds"]) == ("diverged", failed - 1)
    assert summary["accuracy"]["max"] == max(record["p_acc"] for record in records)
    with pytest.raises(DivergedError, match=f"round {failed}:"):
        pfedlms.resume(out, pairs, linear)  # fails again, and no metrics are lost
    assert stored_metrics(out) == records


def test_metrics_are_valid_json_if_a_test_loss_is_not_finite(tmp_path: Path) -> None:
    """A test sample so large that the outputs overflow, which no training sample is."""
    module = linear()
    nn.init.constant_(module.weight, 2.0)
    pairs = [(pool(30), (np.full((1, FEATURES), 3e38), [0])), (pool(30, 1), pool(9, 2))]
    pfedlms.run(pairs, module, method="local", out=tmp_path / "run", rounds=2, local_steps=1, threads=1)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=pytest.fail)
        assert record["test_loss"] is None
        assert record["loss"] > 0


MAIN_WITH_FILE_SIZE_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from pfedlms.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("full", ["checkpoint", "metrics"])
def test_no_metrics_are_lost_on_a_full_disk(full: str, tmp_path: Path) -> None:
    """A limit on file sizes fails writes as a full disk does: of the first checkpoint, which is larger than all else,
    or in the middle of the sixth line of metrics, before any checkpoint."""
    chosen = {
        "data.clients": 3, "train.local_steps": 2, "run.threads": 1, "model.hidden": 64,
        "run.checkpoint_every": 2 if full == "checkpoint" else 8,
    }  # fmt: skip
    run = ["run", "--method", "fedavg", "--rounds", "8"]
    run += [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    out, fresh = tmp_path / "my run", tmp_path / "fresh"
    assert main([*run, "--out", str(fresh), "--quiet"]) == 0
    lines = (fresh / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    complete = 2 if full == "checkpoint" else 5
    limit = 20_000 if full == "checkpoint" else len(b"".join(lines[:complete])) + len(lines[complete]) // 2

    command = [sys.executable, "-c", MAIN_WITH_FILE_SIZE_LIMIT, str(limit), *run, "--out", str(out)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message.startswith(f"error: {out}: cannot write (")
    assert message.endswith(f"make room, then `pfedlms resume '{out}'`")
    assert "Traceback" not in done.stderr
    stored = (out / "metrics.jsonl").read_bytes()
    assert stored.count(b"\n") == complete
    assert [json.loads(line)["round"] for line in stored.splitlines()[:complete]] == list(range(1, complete + 1))
    assert {file.name for file in out.iterdir()} == {".lock", "config.toml", "metrics.jsonl", "summary.json"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["accuracy"]["max"] == max(json.loads(line)["p_acc"] for line in lines[:complete])

    assert main(["resume", str(out), "--quiet"]) == 0  # there is room again
    assert stored_metrics(out) == stored_metrics(fresh)
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
