"""`pfedlms.run` and `pfedlms.compare`: what goes in, what comes out, and what is kept when something goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from small import Crashing, same_models, stored_metrics
from torch import Tensor, nn

import pfedlms
from pfedlms.backend import plain
from pfedlms.cli import main
from pfedlms.errors import ConfigError, DivergedError, RunDirectoryError, UsageError

QUICK = {"rounds": 3, "clients": 4, "local_steps": 3, "batch_size": 8, "threads": 1}
FEATURES, CLASSES = 6, 3


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests run in a folder of their own, so that what is written by mistake is seen."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def pool(count: int, key: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(key)
    labels = np.arange(count) % CLASSES
    return draw.normal(size=(count, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[labels], labels


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def accuracy_by_hand(module: nn.Module, x: Any, y: Any) -> float:
    with torch.no_grad():
        outputs = module.eval()(torch.as_tensor(np.asarray(x), dtype=torch.float32))
    return 100.0 * float((outputs.argmax(dim=1).numpy() == np.asarray(y)).mean())


# --- what goes in ---


@pytest.mark.parametrize("factory", [linear, normalised])
@pytest.mark.parametrize("method", ["pfedlms", "fedavg", "local"])
def test_pairs_and_a_factory_give_models_that_reach_what_is_reported(method: str, factory: Any) -> None:
    """Every client's state dict, in a fresh module, on the very samples given, scores what the metrics say."""
    pairs = [(pool(30 + key, key), pool(9 + key, 50 + key)) for key in range(4)]
    result = pfedlms.run(pairs, factory, method=method, rounds=4, local_steps=5, batch_size=8, threads=1)
    assert (result.summary["dataset"], result.summary["model"], result.summary["clients"]) == ("custom", "custom", 4)
    reported = result.metrics[-1]["client_acc"]
    right = 0
    for state, (_, (x, y)), said in zip(result.models, pairs, reported, strict=True):
        module = factory()
        module.load_state_dict(state)
        reached = accuracy_by_hand(module, x, y)
        assert reached == pytest.approx(said, abs=1e-9)
        right += round(reached / 100 * len(y))
    assert result.metrics[-1]["p_acc"] == pytest.approx(100 * right / sum(len(y) for _, (_, y) in pairs))
    assert result.metrics[-1]["p_acc"] > 50  # of three classes


def test_an_instance_is_the_initial_model_and_stays_as_it_is() -> None:
    """Close to no learning: every client ends where the module began."""
    module = normalised()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = pfedlms.run(pool(100), module, method="local", learning_rate=1e-30, weight_decay=0.0, **QUICK)
    for state in result.models:
        for name, _ in module.named_parameters():
            assert torch.allclose(state[name], before[name], rtol=0, atol=1e-25)
        assert not torch.equal(state["1.running_mean"], before["1.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_factory_draws_from_the_seed_and_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    runs = [pfedlms.run(pool(100), linear, seed=seed, **QUICK) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)
    first, again, other = [run.federation.model.initial for run in runs]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class WithFrozenAndTied(nn.Module):
    """A frozen layer, and an output that shares its weights with the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, CLASSES)
        self.first = nn.Linear(CLASSES, CLASSES)
        self.second = nn.Linear(CLASSES, CLASSES)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.frozen(x))))


def test_frozen_and_tied_parameters_come_back_in_their_places() -> None:
    module = WithFrozenAndTied()
    result = pfedlms.run(pool(100), module, method="fedavg", **QUICK)
    assert result.summary["parameters"] == 9 + 3 + 3  # the shared matrix once, two biases
    for state in result.models:
        assert torch.equal(state["frozen.weight"], module.frozen.weight)
        assert torch.equal(state["first.weight"], state["second.weight"])
        WithFrozenAndTied().load_state_dict(state)


def test_settings_may_stand_in_a_file_which_may_name_the_method(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[method]\nname = "fedavg"\n[train]\nrounds = 5\nlocal_steps = 2\n')
    result = pfedlms.run(pool(100), linear, config=file, **{**QUICK, "rounds": 2})
    assert result.summary["method"] == "fedavg"
    assert result.summary["rounds"] == 2  # the keyword comes on top
    assert result.config.train.local_steps == 3
    assert pfedlms.run(pool(100), linear, config=file, method="local", **QUICK).summary["method"] == "local"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"round": 3, "alfa": 1.0},
            r"round: unknown setting; did you mean rounds\?\nalfa: unknown setting; did you mean",
        ),
        ({"method": "fedavg", "strength": 0.1}, "strength: a setting of pfedlms, "),
        ({"method": "", "patience": 3}, "method.name: got ''"),
        ({"patience": 3}, r"train\.patience: got 3 with data\.validation = 0; it follows V-acc"),
        ({"data": "digtis", "model": "vgg9"}, r"data\.dataset: got 'digtis'(.|\n)*model\.name: got 'vgg9'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pfedlms.run(**settings)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (pool(3), linear, "got 4 clients with data.min_samples 10 each, but there are only 3 samples"),
        ([], linear, "data: got a list of 0"),
        (pool(60), lambda: nn.Linear(FEATURES + 1, CLASSES), "model: fails on samples of shape"),
        (pool(60), lambda: nn.Linear(FEATURES, CLASSES - 1), "model: got outputs of shape (5, 2)"),
        (pool(60), lambda: nn.Flatten(), "no trainable parameters"),
        (pool(60), lambda: "a model", "the factory returned str"),
    ],
)
def test_wrong_data_and_models_are_named_before_anything_is_written(
    data: Any, model: Any, message: str, tmp_path: Path
) -> None:
    settings = {key: value for key, value in QUICK.items() if key != "clients" or isinstance(data, tuple)}
    for play in (pfedlms.run, pfedlms.compare):
        with pytest.raises(UsageError) as caught:
            play(data, model, out=tmp_path / "run", **settings)
        assert message in str(caught.value)
        assert not (tmp_path / "run").exists()


# --- what comes out ---


@pytest.mark.parametrize("method", ["fedavg", "local", "pfedlms"])
def test_the_summary_agrees_with_the_metrics(method: str, tmp_path: Path) -> None:
    """Keys as the issue names them; maximum, mean of the last ten and last by hand; bytes per round times rounds."""
    out = tmp_path / "run"
    result = pfedlms.run(pool(120), normalised, method=method, out=out, seed=7, **{**QUICK, "rounds": 13})
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    assert result.summary == summary
    assert result.metrics == records
    assert result.directory == out
    assert (summary["method"], summary["seed"], summary["clients"], summary["rounds"]) == (method, 7, 4, 13)
    assert summary["parameters"] == FEATURES * 8 + 8 + 2 * 8 + 8 * CLASSES + CLASSES

    reached = [record["p_acc"] for record in records]
    assert [record["round"] for record in records] == list(range(1, 14))
    assert summary["accuracy"].keys() == {"max", "last10", "final"}
    assert summary["accuracy"]["max"] == max(reached)
    assert summary["accuracy"]["last10"] == pytest.approx(mean(reached[3:]))
    assert summary["accuracy"]["final"] == reached[12]
    assert summary["participation"] == 1
    assert summary["everyone"] == {
        "accuracy": reached[12], "test_loss": records[12]["test_loss"], "client_acc": records[12]["client_acc"],
        "mean_over_clients": pytest.approx(mean(records[12]["client_acc"])),
    }  # fmt: skip

    last = records[-1]["bytes"]
    parts = {"up_payload", "up_framing", "down_payload", "down_framing", "catch_up"}
    assert last.keys() == summary["bytes_per_round"].keys() == parts
    assert last["catch_up"] == 0  # nobody was away
    assert all(13 * summary["bytes_per_round"][key] == last[key] for key in last)
    assert summary["total_bytes"] == sum(last.values())
    assert [sum(record["bytes"].values()) for record in records] == [
        n * sum(records[0]["bytes"].values()) for n in range(1, 14)
    ]
    for record in records:
        assert {"loss", "seconds"} <= record.keys()
        assert len(record["client_acc"]) == 4
        assert not record.keys() & {"clients", "unheard"}  # all took part, and nothing can get lost
        assert ("g_acc" in record) == (method == "fedavg")


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_the_last_round_is_always_evaluated(every: int, evaluated: list[int]) -> None:
    result = pfedlms.run(pool(100), linear, method="fedavg", evaluate_every=every, **{**QUICK, "rounds": 5})
    assert [record["round"] for record in result.metrics] == evaluated
    assert all("g_acc" in record for record in result.metrics)


def test_measuring_more_often_changes_nothing() -> None:
    runs = [pfedlms.run(pool(100), normalised, evaluate_every=every, **QUICK) for every in (1, 3)]
    assert runs[0].metrics[-1]["client_acc"] == runs[1].metrics[-1]["client_acc"]
    assert same_models(runs[0].models, runs[1].models)


# --- how it is executed ---


def test_settings_of_the_process_are_left_as_they_were() -> None:
    """Also where a run fails."""
    cudnn = torch.backends.cudnn

    def now() -> tuple[object, ...]:
        return torch.get_num_threads(), cudnn.benchmark, cudnn.deterministic

    before = now()
    pfedlms.run(pool(100), linear, **{**QUICK, "threads": 2})
    assert now() == before
    with pytest.raises(DivergedError):
        pfedlms.run(pool(100), linear, method="fedavg", learning_rate=1e30, **{**QUICK, "threads": 2})
    assert now() == before


@pytest.mark.parametrize("method", ["pfedlms", "fedavg", "fedproto"])
def test_the_reference_is_plain_and_takes_one_client_after_another(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches what a run reaches, up to rounding."""
    entered = []

    @contextmanager
    def noted() -> Iterator[None]:
        entered.append("plain")
        with plain():
            yield

    monkeypatch.setattr("pfedlms.experiment.prepare.plain", noted)
    fast = pfedlms.run(pool(100), normalised, method=method, **QUICK)
    assert not entered
    reference = pfedlms.run(pool(100), normalised, method=method, reference=True, **QUICK)
    assert entered
    assert (fast.federation.largest_cohort, reference.federation.largest_cohort) == (4, 1)
    for ours, theirs in zip(fast.metrics, reference.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["bytes"] == theirs["bytes"]


# --- augmentation ---


def test_only_training_is_augmented() -> None:
    """With a learning rate of nearly zero all models stay the same, and so does what they reach on test samples."""
    settings = {**QUICK, "hidden": 16, "method": "fedavg", "learning_rate": 1e-30}
    plain, changed = (pfedlms.run(augment=augment, **settings).metrics[-1] for augment in ("none", "crop+flip"))
    assert changed["loss"] != plain["loss"]
    for key in ("p_acc", "g_acc", "test_loss"):
        assert changed[key] == plain[key]


def test_augmentation_needs_images() -> None:
    with pytest.raises(UsageError, match=r"train\.augment: got 'crop', but samples have shape \(6,\)"):
        pfedlms.run(pool(100), linear, augment="crop", **QUICK)
    with pytest.raises(ConfigError, match=r"train\.augment: got 'mirror', expected one of: none, crop, flip"):
        pfedlms.run(augment="mirror")


# --- what is kept when something goes wrong ---


def test_a_loss_that_becomes_nan_keeps_what_was_measured(tmp_path: Path) -> None:
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
        pfedlms.resume(out, pairs, linear)  # the same again, and nothing lost
    assert len((out / "metrics.jsonl").read_text().splitlines()) == failed - 1


def test_metrics_are_json_even_where_a_test_loss_is_not_finite(tmp_path: Path) -> None:
    """A test sample so large that the outputs overflow, which no training sample is."""
    module = linear()
    nn.init.constant_(module.weight, 2.0)
    pairs = [(pool(30), (np.full((1, FEATURES), 3e38), [0])), (pool(30, 1), pool(9, 2))]
    pfedlms.run(pairs, module, method="local", out=tmp_path / "run", rounds=2, local_steps=1, threads=1)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=refuse)
        assert record["test_loss"] is None
        assert record["loss"] > 0


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from pfedlms.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("full", ["checkpoint", "metrics"])
def test_a_full_disk_loses_nothing(full: str, tmp_path: Path) -> None:
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
    whole = 2 if full == "checkpoint" else 5
    limit = 20_000 if full == "checkpoint" else len(b"".join(lines[:whole])) + len(lines[whole]) // 2

    command = [sys.executable, "-c", LIMITED, str(limit), *run, "--out", str(out)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message.startswith(f"error: {out}: cannot write (")
    assert message.endswith(f"make room, then `pfedlms resume '{out}'`")
    assert "Traceback" not in done.stderr
    kept = (out / "metrics.jsonl").read_bytes()
    assert kept.count(b"\n") == whole
    assert [json.loads(line)["round"] for line in kept.splitlines()[:whole]] == list(range(1, whole + 1))
    assert {file.name for file in out.iterdir()} == {".lock", "config.toml", "metrics.jsonl", "summary.json"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["accuracy"]["max"] == max(json.loads(line)["p_acc"] for line in lines[:whole])

    assert main(["resume", str(out), "--quiet"]) == 0  # there is room again
    assert stored_metrics(out) == stored_metrics(fresh)
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"


def test_a_directory_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    """Permission bits do not bind root, so: below a regular file, in /proc, with a name that is too long."""
    (tmp_path / "file").write_text("not a folder")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/pfedlms/run"), tmp_path / ("a" * 300)):
        with pytest.raises(RunDirectoryError, match="name another out=DIR"):
            pfedlms.run(pool(100), linear, out=out, callbacks=[Crashing(1)], **QUICK)
    assert (tmp_path / "file").read_text() == "not a folder"
