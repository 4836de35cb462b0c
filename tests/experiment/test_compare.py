"""Seeds of a method that are trained as one stack measure what they measure one after another."""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pfedlms
from pfedlms import rng
from pfedlms.data import load
from pfedlms.engine import lockstep
from pfedlms.errors import PfedlmsError, RunDirectoryError
from pfedlms.experiment.compare import resume_comparison
from pfedlms.experiment.run import Progress
from pfedlms.methods import METHODS

SEEDS = 3
SMALL = {"rounds": 3, "clients": 5, "hidden": 16, "local_steps": 2, "batch_size": 8, "threads": 1, "seeds": SEEDS}


class Heard(Progress):
    """All records of all runs, without what depends on the time of day."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def started(self, config: Any, rounds_played: int) -> None:
        self.records.setdefault((config.method, config.run.seed), [])

    def evaluated(self, config: Any, record: Mapping[str, Any]) -> None:
        told = {key: value for key, value in record.items() if key != "seconds"}
        self.records[config.method, config.run.seed].append(told)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many federations took their steps together, every time that some did."""
    sizes: list[int] = []
    together = lockstep.train_together

    def counted(due: Sequence[Any]) -> Any:
        sizes.append(len(due))
        return together(due)

    monkeypatch.setattr(lockstep, "train_together", counted)
    return sizes


def without_seconds(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in summary.items() if key != "seconds"} for summary in summaries]


def measured(data: Any = "digits", model: Any = None, **settings: Any) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Summaries and records of a comparison."""
    heard = Heard()
    comparison = pfedlms.compare(data, model, progress=heard, **{**SMALL, **settings})
    return without_seconds(comparison.runs), heard.records


def digits() -> tuple[np.ndarray, np.ndarray]:
    source = load("digits")
    return source.x[:600], source.y[:600]


def pairs() -> list[Any]:
    """Four clients with 40 to 70 training samples and 20 test samples each."""
    x, y = digits()
    ends = np.cumsum([0, 60, 70, 80, 90])
    return [
        ((x[start : stop - 20], y[start : stop - 20]), (x[stop - 20 : stop], y[stop - 20 : stop]))
        for start, stop in pairwise(ends)
    ]


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


CASES: dict[str, dict[str, Any]] = {
    **{method: {"methods": [method]} for method in METHODS},
    "batch norm": {"model": batch_norm, "methods": ["fedavg", "pfedlms"]},
    "an instance": {"model": plain(), "methods": ["pfedlms"]},
    "momentum": {"methods": ["local", "fedavg"], "momentum": 0.8},
    "augmentation": {"methods": ["fedavg"], "augment": "crop+flip"},
    "arrays": {"data": digits(), "model": plain, "methods": ["pfedlms"], "seed": 7},
    "pairs": {"data": pairs(), "model": plain, "methods": ["fedproto"], "clients": 4},
    "one client": {"methods": ["fedavg"], "clients": 1},
}


def measured_alone(data: Any = "digits", model: Any = None, **settings: Any) -> tuple[list[Any], dict[Any, Any]]:
    """The same of runs that know nothing of each other."""
    chosen = {**SMALL, **settings}
    methods, seeds, first = chosen.pop("methods"), chosen.pop("seeds"), chosen.pop("seed", 0)
    heard = Heard()
    runs = [
        pfedlms.run(data, model, method=method, seed=seed, progress=heard, **chosen).summary
        for method in methods
        for seed in range(first, first + seeds)
    ]
    return without_seconds(runs), heard.records


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stacked_seeds_measure_what_seeds_alone_measure(case: dict[str, Any], stacks: list[int]) -> None:
    together = measured(**case, stack_seeds="always")
    assert set(stacks) == {SEEDS}
    stacks.clear()
    assert measured(**case, stack_seeds="never") == together
    assert set(stacks) == {1}
    assert measured_alone(**case) == together
    losses = {record["loss"] for records in together[1].values() for record in records}
    assert len(losses) == len(case["methods"]) * SEEDS * SMALL["rounds"]  # so a mix-up would show


def test_on_a_cpu_seeds_are_stacked_only_if_asked_to(stacks: list[int]) -> None:
    measured(methods=["local"], rounds=1)
    assert set(stacks) == {1}


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Dropout(0.5), nn.Linear(12, 10))


def frozen() -> nn.Module:
    module = plain()
    module[1].requires_grad_(False)
    return module


class FunctionalDropout(nn.Module):
    """Draws without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(F.dropout(x, 0.5, self.training))


class Recurrent(nn.Module):
    """Draws between two layers of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.flatten(1, 2))[0][:, -1])


class Masked(nn.Module):
    """Has numbers of its seed in what is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mask = plain(), torch.rand(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.mask)


class Ordered(nn.Module):
    """Columns in an order that is drawn for each seed and is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.order = plain(), torch.randperm(8).tolist()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[..., self.order])


ALONE = [
    pytest.param({"model": dropout}, id="dropout"),
    pytest.param({"model": frozen}, id="frozen"),
    pytest.param({"cohort_size": 2}, id="several cohorts"),
    pytest.param({"model": FunctionalDropout}, id="functional dropout"),
    pytest.param({"model": Recurrent}, id="recurrent dropout"),
    pytest.param({"model": Masked}, id="tensor attribute"),
    pytest.param({"model": Ordered}, id="an order of its own"),
]


@pytest.mark.filterwarnings("ignore:run.stack_seeds")
@pytest.mark.parametrize("case", ALONE)
def test_what_cannot_be_stacked_runs_one_by_one(case: dict[str, Any], stacks: list[int]) -> None:
    together = measured(methods=["fedavg"], **case, stack_seeds="always")
    assert measured(methods=["fedavg"], **case, stack_seeds="never") == together
    assert set(stacks) == {1}


# --- one that diverges

HUGE = 1


def growing() -> nn.Module:
    """Weights that a huge weight decay multiplies by −11 in every step; those of one seed start at 3 · 10³⁰."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    if torch.initial_seed() == rng.stream(HUGE, "initial") % (1 << 63):
        nn.init.constant_(module[1].weight, 3e30)
    return module


def test_a_seed_that_diverges_does_not_take_the_others_with_it(stacks: list[int]) -> None:
    options = {"model": growing, "methods": ["local", "fedavg"], "learning_rate": 1.0, "weight_decay": 12.0}
    with pytest.warns(UserWarning, match=f"seed {HUGE} diverged: round 3"):
        together = measured(**options, rounds=4, stack_seeds="always")
    assert stacks == 2 * [3, 3, 3, 3, 2]  # the start and four rounds; the third is the last of the one that diverges
    with pytest.warns(UserWarning, match="diverged"):
        assert measured(**options, rounds=4, stack_seeds="never") == together
    ends = [(run["seed"], run["status"], run["rounds"]) for run in together[0][:SEEDS]]
    assert ends == [(0, "finished", 4), (1, "diverged", 2), (2, "finished", 4)]


# --- Ctrl-C


class Pressing(Progress):
    """Ctrl-C while the evaluation of one round of one seed is told."""

    def __init__(self, seed: int, at: int) -> None:
        self._when = (seed, at)

    def evaluated(self, config: Any, record: Mapping[str, Any]) -> None:
        if (config.run.seed, record["round"]) == self._when:
            signal.raise_signal(signal.SIGINT)


def stored(out: Path, methods: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Summaries and metrics of all runs in a folder."""
    folders = [out / f"{method}-seed{seed}" for method in methods for seed in range(SEEDS)]
    lines = [line for folder in folders for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    return without_seconds(summaries), without_seconds([json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    out = tmp_path_factory.mktemp("whole") / "c"
    pfedlms.compare(methods=["pfedlms", "fedavg"], out=out, stack_seeds="never", **{**SMALL, "rounds": 4})
    return stored(out, ["pfedlms", "fedavg"])


@pytest.mark.parametrize(
    ("pressed", "reached"), [((0, 1), [1, 1, 1]), ((1, 2), [3, 2, 2]), ((2, 3), [4, 4, 3]), ((0, 4), [4, 4, 4])]
)
def test_ctrl_c_leaves_all_stacked_seeds_to_go_on(
    pressed: tuple[int, int], reached: list[int], tmp_path: Path, stacks: list[int],
    uninterrupted: tuple[list[Any], list[Any]],
) -> None:  # fmt: skip
    """Seeds before the one at which it was pressed are in their next round by then, and end that."""
    out = tmp_path / "c"
    methods, options = ["pfedlms", "fedavg"], {**SMALL, "rounds": 4, "stack_seeds": "always"}
    ended = pfedlms.compare(methods=methods, out=out, progress=Pressing(*pressed), **options)
    assert ended.interrupted
    assert [run["rounds"] for run in ended.runs] == reached
    assert [run["status"] == "finished" for run in ended.runs] == [rounds == 4 for rounds in reached]
    for seed, rounds in enumerate(reached):
        folder = out / f"pfedlms-seed{seed}"
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == rounds
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["federation"]["rounds_played"] == rounds
    stacks.clear()
    resumed = resume_comparison(out, None, None, Progress())
    assert not resumed.interrupted
    assert stored(out, methods) == uninterrupted
    assert without_seconds(resumed.runs) == uninterrupted[0]
    assert sum(stacks) == sum(4 - rounds for rounds in reached) + SEEDS * 5  # what was left, and the other method


def test_a_seed_that_was_finished_alone_is_not_in_the_way_of_the_others(
    tmp_path: Path, stacks: list[int], uninterrupted: tuple[list[Any], list[Any]]
) -> None:
    out = tmp_path / "c"
    options = {**SMALL, "rounds": 4, "stack_seeds": "always"}
    pfedlms.compare(methods=["pfedlms", "fedavg"], out=out, progress=Pressing(0, 2), **options)
    assert pfedlms.resume(out / "pfedlms-seed1").summary["status"] == "finished"
    stacks.clear()
    resume_comparison(out, None, None, Progress())
    assert stacks == [2, 2] + [SEEDS] * 5
    assert stored(out, ["pfedlms", "fedavg"]) == uninterrupted


@pytest.mark.parametrize("broken", ["checkpoint.pt", "config.toml"])
def test_a_run_that_cannot_go_on_leaves_no_other_locked(broken: str, tmp_path: Path) -> None:
    """One is found while the runs of the group are opened, the other when they begin."""
    out = tmp_path / "c"
    options = {**SMALL, "learning_rate": 0.1, "stack_seeds": "always"}
    pfedlms.compare(methods=["fedavg"], out=out, progress=Pressing(0, 1), **options)
    for seed in range(SEEDS) if broken == "config.toml" else (1,):
        file = out / f"fedavg-seed{seed}" / broken
        file.write_bytes(file.read_bytes().replace(b"learning_rate = 0.1", b"learning_rate = 0.2")[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(RunDirectoryError) as caught:
            resume_comparison(out, None, None, Progress())
        held = [file for file in Path("/proc/self/fd").iterdir() if str(file.resolve()).startswith(str(out))]
        del caught  # until then nothing is collected
    assert not held


def test_asking_for_a_stack_that_cannot_be_is_answered() -> None:
    with pytest.warns(UserWarning, match=r"run\.stack_seeds: seeds run one by one"):
        measured(methods=["local"], model=dropout, stack_seeds="always")


def test_runs_of_a_stack_share_its_time() -> None:
    began = time.perf_counter()
    runs = pfedlms.compare("digits", methods=["local"], seeds=3, rounds=3, clients=3, stack_seeds="always").runs
    assert 0 < sum(run["seconds"] for run in runs) <= time.perf_counter() - began + 0.01  # each is rounded


def test_a_run_of_a_comparison_keeps_its_own_data(tmp_path: Path) -> None:
    """A folder whose config.toml was changed before it began must not be trained on the others' samples."""
    pfedlms.compare("digits", methods=["local"], seeds=2, rounds=1, clients=3, out=tmp_path / "c")
    folder = tmp_path / "c" / "local-seed1"
    for name in ("checkpoint.pt", "metrics.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('dataset = "digits"', 'dataset = "mnist"'))
    with pytest.raises(PfedlmsError, match="mnist"):
        resume_comparison(tmp_path / "c", None, None, Progress())
