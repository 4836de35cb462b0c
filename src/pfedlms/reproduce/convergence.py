"""The convergence theorem, measured: softmax regression, whose constants can be computed, against R, h and λ with
η = 1/L_F; then the theorem's left side alone on `dnn` with the settings used in practice.

At η = 1/L_F the theorem needs no expectation. A step θ⁺ = θ − η(∇F + ξ) of an L_F-smooth F has

    F(θ⁺) ≤ F(θ) − η(1 − L_F η/2)‖∇F‖² − η(1 − L_F η)⟨∇F, ξ⟩ + (L_F η²/2)‖ξ‖²

where the product drops out, so the bound holds for every run by itself, and for batches that walk through shuffles as
well, which are not independent. Summed up over a run,

    left ≤ 2(Ψ⁰ − Ψ^R)/(ηER) + L_F η · mean ‖ξ‖² + (2/(ηER)) Σ_r D^r

with D^r = Σ_k p_k [F_k(θ_k^{r+1}; V^{r+1}) − F_k(θ_k^{r+1}; V^r)]. That is reported beside the bound, which
replaces Ψ^R by Ψ_inf, the mean by σ² and D^r by λβ^r.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from pfedlms.data import FederatedData
from pfedlms.engine import Federation
from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config, load_config
from pfedlms.experiment.loop import fixed_settings as settled
from pfedlms.experiment.prepare import as_configured, named_pool, prepare, train_settings
from pfedlms.experiment.problem import Problem as LearningProblem
from pfedlms.experiment.store import write_atomically
from pfedlms.reproduce.constants import Problem, Terms, softmax_smoothness, terms
from pfedlms.reproduce.trajectory import Trajectory, WatchedPFedLMS, WatchedSettings, follow

SCHEMA = 2
NEVER = 1_000_000
"""h of a sketch that is kept for the whole run."""
BASE = (0.05, 1)
"""λ and h that are held while the other is varied, and R."""
_STRENGTHS, _REFRESHES = (0.0, 0.01, 0.05, 0.2), (1, 5, NEVER)
_AFTER = (1, 2, 5, 10, 20, 50, 100)

Say = Callable[[str], None]
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """One run: what is trained and for how long; gradients are computed in every `every`-th round."""

    model: str
    seed: int
    strength: float
    refresh: int
    rounds: int
    local_steps: int
    every: int = 1

    @property
    def name(self) -> str:
        kept = "never" if self.refresh >= NEVER else str(self.refresh)
        return f"{self.model}, λ {self.strength:g}, h {kept}, seed {self.seed}"


@dataclass(frozen=True)
class ConvergenceDocument:
    """Everything that was measured, as plain data; kept as `convergence-DATASET.json`, with the settings of the data
    set, which all runs share."""

    dataset: str
    runs: list[Record]
    """Softmax regression: `plan`, `constants`, `trajectory` (a list a quantity, a number a round) and `allowed`: λβ^r,
    and `allowed_by_norm`, the same with the largest ‖θ‖ of the run for B_θ."""
    rows: list[Record]
    """Of every run after some R: `left`, `bound` and `measured` by term with their totals, `ratio` = bound/left."""
    practice: list[Record]
    """`dnn`: `plan`, `settings`, `left`, and `stationarity` of the rounds looked at."""


def convergence(
    dataset: str,
    out: Path,
    data_dir: str = "",
    device: str = "auto",
    seeds: Sequence[int] = (0,),
    quick: bool = False,
    progress: Say | None = None,
) -> ConvergenceDocument:
    """Measure, or read what was measured before in `out`; every run is kept as it ends. What was measured with other
    settings of the data set is refused. `progress` is told of every run as it begins."""
    out.mkdir(parents=True, exist_ok=True)
    file, settings = out / f"convergence-{dataset}.json", settled(_config(dataset, data_dir, device, seeds[0]))
    kept = _kept(file, settings)
    made: dict[str, list[Record]] = {"softmax": [], "dnn": []}
    for seed in seeds:
        configs = {model: _config(dataset, data_dir, device, seed) for model in made}
        prepared: dict[str, Federation] = {}
        for plan in plans(configs["softmax"], seed, quick):
            found = next((run for run in kept if run["plan"] == asdict(plan)), None)
            if found is None:
                if progress is not None:
                    progress(plan.name)
                config = configs[plan.model]
                if plan.model not in prepared:
                    own = LearningProblem(model=softmax(config) if plan.model == "softmax" else None)
                    prepared[plan.model] = prepare(config, own)
                found = (_theory if plan.model == "softmax" else _practice)(plan, config, prepared[plan.model])
                kept.append(found)
                _keep(file, dataset, settings, kept)
            made[plan.model].append(found)
    return ConvergenceDocument(
        dataset, made["softmax"], [row for run in made["softmax"] for row in _rows(run)], made["dnn"]
    )


def plans(config: Config, seed: int, quick: bool) -> Iterator[Plan]:
    """All runs of a seed: λ and h in turn, then `dnn`. Large data sets get fewer rounds and steps, because every
    gradient is one over all samples."""
    small = config.data.dataset == "digits"
    rounds, steps = (6 if quick else 100, config.train.local_steps) if small else (2 if quick else 10, 10)
    pairs = [(strength, BASE[1]) for strength in _STRENGTHS] + [(BASE[0], h) for h in _REFRESHES if h != BASE[1]]
    if quick:
        pairs = [(0.0, 1), BASE, (BASE[0], NEVER)]
    for strength, refresh in pairs:
        yield Plan("softmax", seed, strength, refresh, rounds, steps)
    used, practised = config.settings, config.train.local_steps
    last = rounds if small else (1 if quick else 21)
    yield Plan("dnn", seed, used.strength, used.refresh, last, practised, 1 if small else 10)


def softmax(config: Config) -> Callable[[], nn.Module]:
    """Softmax regression for the data of a configuration: one linear layer."""
    pool = named_pool(config)
    features, classes = prod(pool.x.shape[1:]), int(pool.y.max()) + 1
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def problem_of(plan: Plan, model: Federation, ratio: float, smoothing: float, decay: float) -> Problem:
    """The constants of softmax regression. L_f is that of the client with the largest. ρ is `smoothing` times the
    deviation of Φ⁰w⁰, a number known before the first step, and stays that."""
    data, layout = model.data, model.model.layout
    sizes, pads = layout.sketch_sizes(ratio), tuple(layer.pad for layer in layout.layers)
    # Entries of Φθ have the variance ‖θ‖²/m.
    rho = float(np.float32(smoothing * float(model.model.initial.double().norm()) / sum(sizes) ** 0.5))
    return Problem(largest_smoothness(data), sizes, pads, plan.strength, rho, decay)


def largest_smoothness(data: FederatedData) -> float:
    """L_f: the largest of all clients'."""
    return max(softmax_smoothness(data.x[held].flatten(1)) for held in data.train)


def _config(dataset: str, data_dir: str, device: str, seed: int) -> Config:
    """The shipped settings of a data set."""
    return load_config(None, {"data": {"dataset": dataset, "dir": data_dir}, "run": {"seed": seed, "device": device}})


def _watched(plan: Plan, config: Config, prepared: Federation, settings: WatchedSettings, rate: float) -> Trajectory:
    """Rounds of the engine on what `prepare` made, a client after another, and what was seen in them."""
    train = replace(train_settings(config), local_steps=plan.local_steps, learning_rate=rate, rounds=plan.rounds)
    with as_configured(config):
        federation = Federation(
            WatchedPFedLMS, settings, prepared.model, prepared.data, train, plan.seed, cohort_size=1
        )
        return follow(federation, train, plan.seed, plan.rounds, plan.every)


def _theory(plan: Plan, config: Config, prepared: Federation) -> Record:
    """Softmax regression with η = 1/L_F, and all constants: σ² and G² are the largest ‖ĝ − ∇f‖² and ‖ĝ‖² of all batches
    of the run, τ_max its largest threshold."""
    used = config.settings
    problem = problem_of(plan, prepared, used.ratio, used.smoothing, config.train.weight_decay)
    settings = WatchedSettings(
        thresholds=used.thresholds, ratio=used.ratio, strength=plan.strength, smoothing=problem.rho,
        refresh=plan.refresh, absolute=True,
    )  # fmt: skip
    rate = 1 / problem.smoothness
    seen = _watched(plan, config, prepared, settings, rate)
    gradient, threshold, largest = max(seen.largest_gradient), max(seen.largest_threshold), max(seen.largest_model)
    model = problem.largest_model(gradient, seen.start)
    refreshed = [(round + 1) % plan.refresh == 0 for round in range(plan.rounds)]
    constants = {
        **asdict(problem), "kappas": problem.kappas, "smoothness": problem.smoothness, "rate": rate,
        "noise": max(seen.largest_noise), "gradient": gradient, "threshold": threshold, "model": model,
        "lowest": problem.lowest,
    }  # fmt: skip
    return {
        "plan": asdict(plan),
        "constants": constants,
        "trajectory": asdict(seen),
        "allowed": [plan.strength * problem.drift(fresh, model, threshold) for fresh in refreshed],
        "allowed_by_norm": [plan.strength * problem.drift(fresh, largest, threshold) for fresh in refreshed],
    }


def _practice(plan: Plan, config: Config, prepared: Federation) -> Record:
    """The left side with a data set's own settings, ρ relative to σ̄ as everywhere else."""
    used = config.settings
    settings = WatchedSettings(**{each.name: getattr(used, each.name) for each in fields(used)})
    seen = _watched(plan, config, prepared, settings, config.train.learning_rate)
    shown = {"learning_rate": config.train.learning_rate, "weight_decay": config.train.weight_decay, **asdict(used)}
    return {
        "plan": asdict(plan),
        "settings": shown,
        "left": sum(seen.stationarity) / len(seen.stationarity),
        "stationarity": seen.stationarity,
        "noise": seen.noise,
    }


def _rows(run: Record) -> Iterator[Record]:
    """A run after some numbers of rounds, each with the constants of the whole of it."""
    plan, constants, seen = run["plan"], run["constants"], run["trajectory"]
    known = constants["smoothness"], constants["rate"]
    for rounds in dict.fromkeys([*(each for each in _AFTER if each < plan["rounds"]), plan["rounds"]]):
        start, steps = seen["potential"][0], plan["local_steps"]
        left = sum(seen["stationarity"][:rounds]) / rounds
        noise = sum(seen["noise"][:rounds]) / rounds
        bound = terms(start - constants["lowest"], *known, constants["noise"], run["allowed"][:rounds], steps)
        by_norm = terms(0.0, *known, 0.0, run["allowed_by_norm"][:rounds], steps).drift
        measured = terms(start - seen["potential"][rounds], *known, noise, seen["drift"][:rounds], steps)
        yield {
            **{key: plan[key] for key in ("seed", "strength", "refresh")},
            "rounds": rounds,
            "left": left,
            "bound": _by_name(bound),
            "measured": _by_name(measured),
            "drift_by_norm": by_norm,
            "ratio": bound.total / left,
        }


def _by_name(found: Terms) -> dict[str, float]:
    return {**asdict(found), "total": found.total}


def _kept(file: Path, settings: Record) -> list[Record]:
    """Its runs: all that they depend on is in these settings of the data set, and in each one's plan."""
    if not file.exists():
        return []
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise UsageError(
                f"{file}: got schema {document['schema']!r}, expected {SCHEMA}; it is of another version, move it away"
            )
        other = [
            f"{key} {document['settings'].get(key)!r}, now {value!r}"
            for key, value in settings.items()
            if document["settings"].get(key) != value
        ]
        if other:
            raise UsageError(f"{file}: was measured with {'; '.join(other)}; name another --out, or move it away")
        return [*document["runs"], *document["practice"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: is no document of convergence ({error}); move it away") from error


def _keep(file: Path, dataset: str, settings: Record, kept: Sequence[Record]) -> None:
    runs = [run for run in kept if run["plan"]["model"] == "softmax"]
    document = {
        "schema": SCHEMA,
        "dataset": dataset,
        "settings": settings,
        "rows": [row for run in runs for row in _rows(run)],
        "runs": runs,
        "practice": [run for run in kept if run["plan"]["model"] != "softmax"],
    }
    write_atomically(file, lambda target: target.write(json.dumps(document, indent=1).encode() + b"\n"))
