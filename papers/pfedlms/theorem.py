"""The convergence theorem, measured: softmax regression, whose constants can be computed, against R, h and λ with
η = 1/L_F; then the theorem's left side alone on `dnn` with the settings used in practice. For K clients, E local steps,
R rounds and η ≤ 1/L_F the paper has

    (1/RE) Σ_r Σ_e Σ_k p_k E‖∇F_k(θ_k^{r,e}; V^r)‖² ≤ 2(Ψ⁰ − Ψ_inf)/(ηER) + L_F η σ² + (2λ/(ηER)) Σ_r β^r

At η = 1/L_F the theorem needs no expectation. A step θ⁺ = θ − η(∇F + ξ) of an L_F-smooth F has

    F(θ⁺) ≤ F(θ) − η(1 − L_F η/2)‖∇F‖² − η(1 − L_F η)⟨∇F, ξ⟩ + (L_F η²/2)‖ξ‖²

where the product is zero. So the bound holds for every single run, also for batches that are taken from shuffles and
are not independent. Summed over a run,

    left ≤ 2(Ψ⁰ − Ψ^R)/(ηER) + L_F η · mean ‖ξ‖² + (2/(ηER)) Σ_r D^r

with D^r = Σ_k p_k [F_k(θ_k^{r+1}; V^{r+1}) − F_k(θ_k^{r+1}; V^r)]. This is reported beside the bound,
which has Ψ_inf for Ψ^R, σ² for the mean and λβ^r for D^r.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pfedlms
from papers.pfedlms.trajectory import Trajectory, WatchedPFedLMS, WatchedSettings, follow
from pfedlms import Config
from pfedlms.data import DATASETS
from pfedlms.engine import Federation
from pfedlms.errors import UsageError

SCHEMA = 2
NEVER = 1_000_000
"""h of a sketch that is never replaced."""
BASE = (0.05, 1)
"""λ and h while the other one, or R, is varied."""
_STRENGTHS, _REFRESHES = (0.0, 0.01, 0.05, 0.2), (1, 5, NEVER)
_AFTER = (1, 2, 5, 10, 20, 50, 100)

Record = dict[str, Any]


def softmax_smoothness(x: Tensor) -> float:
    """L_f of softmax regression with biases on the mean over samples `x: [samples, features]`: ½ λ_max(X̃ᵀX̃/n), where
    X̃ has a column of ones. The Hessian is the mean of (diag(p) − ppᵀ) ⊗ x̃x̃ᵀ, and ‖diag(p) − ppᵀ‖ ≤ ½."""
    extended = torch.cat([x.double(), x.new_ones(len(x), 1, dtype=torch.float64)], dim=1)
    return float(torch.linalg.eigvalsh(extended.T @ extended / len(x))[-1]) / 2


@dataclass(frozen=True)
class Constants:
    """What is known before the first step of F_k = f_k + λ R̃_ρ + (μ/2)‖θ‖², with one absolute ρ for all layers."""

    task_smoothness: float
    """L_f."""
    sizes: tuple[int, ...]
    """m of every layer."""
    pads: tuple[int, ...]
    """N of every layer."""
    strength: float
    """λ."""
    rho: float
    """ρ, in units of a sketch's entries."""
    decay: float
    """μ."""

    @property
    def kappas(self) -> tuple[float, ...]:
        """κ_l = √(N_l/m_l) ≥ ‖Φ_l‖."""
        return tuple(sqrt(pad / m) for pad, m in zip(self.pads, self.sizes, strict=True))

    @property
    def smoothness(self) -> float:
        """L_F = L_f + max_l λ κ_l²/ρ + μ."""
        return self.task_smoothness + self.strength * max(self.kappas) ** 2 / self.rho + self.decay

    @property
    def lowest(self) -> float:
        """Ψ_inf = −λ ρ Σ m_l / 2: a loss is not below 0, and R̃_ρ is not below −ρ/2 for a sketched coordinate."""
        return -self.strength * self.rho * sum(self.sizes) / 2

    def largest_model(self, gradient: float, start: float) -> float:
        """B_θ = max(‖θ⁰‖, √(2 (G² + 4λ² Σ κ_l² m_l)) / μ), from G² and the largest ‖θ_k⁰‖; infinite without decay."""
        moment = gradient + 4 * self.strength**2 * sum(self.pads)  # κ_l² m_l = N_l
        return max(start, sqrt(2 * moment) / self.decay) if self.decay else float("inf")

    def drift(self, refreshed: bool, model: float, threshold: float) -> float:
        """β^r = Σ_l 4 √m κ B χ + 2 √m κ B + 6 m τ_max, with B = `model`."""
        parts = zip(self.sizes, self.kappas, strict=True)
        return sum((4 * refreshed + 2) * sqrt(m) * kappa * model + 6 * m * threshold for m, kappa in parts)


def terms(
    descent: float, smoothness: float, rate: float, noise: float, drifts: Sequence[float], local_steps: int
) -> dict[str, float]:
    """2·descent/(ηER), L_F η·noise, 2 Σ drifts/(ηER) and their total, where R is the number of `drifts`. Ψ⁰ − Ψ_inf, σ²
    and the λβ^r give the theorem's bound; Ψ⁰ − Ψ^R, the mean of ‖ĝ − ∇f‖² and the real drifts the measured terms."""
    scale = 2 / (rate * local_steps * len(drifts))
    found = {"optimisation": scale * descent, "noise": smoothness * rate * noise, "drift": scale * sum(drifts)}
    return {**found, "total": sum(found.values())}


@dataclass(frozen=True)
class Plan:
    """One run; gradients are computed in every `every`-th round."""

    model: str
    seed: int
    strength: float
    refresh: int
    rounds: int
    local_steps: int
    every: int = 1


def convergence(
    dataset: str, out: Path, data_dir: str = "", device: str = "auto", quick: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Record:  # fmt: skip
    """Measure, or read earlier measurements from `out`: the content of convergence-DATASET.json, which is written after
    every run. Measurements with other settings of the data set are refused. `progress` is called with the name of every
    run before it begins.

    `runs`: softmax regression, each with `plan`, `constants`, `trajectory` (one list per quantity, one number per
    round), `allowed`, which is λβ^r, and `allowed_by_norm`, the same with the largest ‖θ‖ of the run for B_θ. `rows`:
    every run after some R with `left`, the terms of the bound and as measured with their totals, and bound/left.
    `practice`: `dnn` with `plan`, `settings`, `left`, and `stationarity` of the rounds that were measured.
    """
    given = {"data": {"dataset": dataset, "dir": data_dir}, "run": {"device": device}}
    config, file = pfedlms.load_config(None, given), out / f"convergence-{dataset}.json"
    document = _read(file, dataset, shared_settings(config))
    prepared: dict[str, Federation] = {}
    for plan in plans(config, quick):
        if any(run["plan"] == asdict(plan) for run in (*document["runs"], *document["practice"])):
            continue
        own = setting_of(asdict(plan))
        progress(f"{plan.model}, λ {own['strength']:g}, h {own['refresh']}, seed {plan.seed}")
        theory = plan.model == "softmax"
        if plan.model not in prepared:
            problem = pfedlms.Problem(model=softmax(dataset) if theory else None)
            prepared[plan.model] = pfedlms.prepare(config, problem)
        if theory:
            document["runs"].append(_theory(plan, config, prepared[plan.model]))
        else:
            document["practice"].append(_practice(plan, config, prepared[plan.model]))
        document["rows"] = [row for run in document["runs"] for row in _rows(run)]
        _write(file, document)
    return document


def plans(config: Config, quick: bool) -> Iterator[Plan]:
    """All runs: λ and h in turn, then `dnn`. Large data sets get fewer rounds and steps, because every gradient is one
    over all samples."""
    small, seed = config.data.dataset == "digits", config.run.seed
    rounds, steps = (6 if quick else 100, config.train.local_steps) if small else (2 if quick else 10, 10)
    pairs = [(strength, BASE[1]) for strength in _STRENGTHS] + [(BASE[0], h) for h in _REFRESHES if h != BASE[1]]
    if quick:
        pairs = [(0.0, 1), BASE, (BASE[0], NEVER)]
    for strength, refresh in pairs:
        yield Plan("softmax", seed, strength, refresh, rounds, steps)
    used, practised = config.settings, config.train.local_steps
    last = rounds if small else (1 if quick else 21)
    yield Plan("dnn", seed, used.strength, used.refresh, last, practised, 1 if small else 10)


def softmax(dataset: str) -> Callable[[], nn.Module]:
    """Softmax regression for a data set: one linear layer."""
    source = DATASETS[dataset]
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(prod(source.shape), source.classes))


def constants_of(plan: Plan, model: Federation, config: Config) -> Constants:
    """Of softmax regression. ρ is `smoothing` times the deviation of Φ⁰w⁰, which is known before the first step."""
    used, layout = config.settings, model.model.layout
    sizes, pads = layout.sketch_sizes(used.ratio), tuple(layer.pad for layer in layout.layers)
    # Entries of Φθ have the variance ‖θ‖²/m.
    rho = float(np.float32(used.smoothing * float(model.model.initial.double().norm()) / sum(sizes) ** 0.5))
    largest = max(softmax_smoothness(model.data.x[held].flatten(1)) for held in model.data.train)  # of any client
    return Constants(largest, sizes, pads, plan.strength, rho, config.train.weight_decay)


def shared_settings(config: Config) -> Record:
    """What all runs on a data set share: everything but the length, where data are and how runs are executed."""
    left_out = ("data.dir", "train.rounds")
    return {key: own for key, own in config.flat().items() if not key.startswith("run.") and key not in left_out}


def _watched(plan: Plan, prepared: Federation, settings: WatchedSettings, rate: float) -> Trajectory:
    """Play rounds of the engine, one client after the other, and measure them."""
    train = replace(prepared.train, local_steps=plan.local_steps, learning_rate=rate, rounds=plan.rounds)
    with warnings.catch_warnings():
        if settings.absolute:  # advice on ρ is in units of σ̄
            warnings.simplefilter("ignore")
        model, data = prepared.model, prepared.data
        federation = Federation(WatchedPFedLMS, settings, model, data, train, plan.seed, cohort_size=1)
    return follow(federation, train, plan.seed, plan.rounds, plan.every)


def _theory(plan: Plan, config: Config, prepared: Federation) -> Record:
    """Softmax regression with η = 1/L_F and all constants. σ² and G² are the largest ‖ĝ − ∇f‖² and ‖ĝ‖² of all batches
    of the run, τ_max is its largest threshold."""
    used = config.settings
    known = constants_of(plan, prepared, config)
    settings = WatchedSettings(
        thresholds=used.thresholds, ratio=used.ratio, strength=plan.strength, smoothing=known.rho,
        refresh=plan.refresh, absolute=True,
    )  # fmt: skip
    rate = 1 / known.smoothness
    seen = _watched(plan, prepared, settings, rate)
    noise, gradient, threshold, largest = (
        max(seen[f"largest_{name}"]) for name in ("noise", "gradient", "threshold", "model")
    )
    model = known.largest_model(gradient, seen["start"][0])
    refreshed = [(round + 1) % plan.refresh == 0 for round in range(plan.rounds)]
    constants = {
        **asdict(known), "kappas": known.kappas, "smoothness": known.smoothness, "rate": rate,
        "noise": noise, "gradient": gradient, "threshold": threshold, "model": model,
        "lowest": known.lowest,
    }  # fmt: skip
    return {
        "plan": asdict(plan),
        "constants": constants,
        "trajectory": seen,
        "allowed": [plan.strength * known.drift(fresh, model, threshold) for fresh in refreshed],
        "allowed_by_norm": [plan.strength * known.drift(fresh, largest, threshold) for fresh in refreshed],
    }


def _practice(plan: Plan, config: Config, prepared: Federation) -> Record:
    """The left side with the settings that are shipped for a data set; ρ is relative to σ̄."""
    used = config.settings
    settings = WatchedSettings(**{each.name: getattr(used, each.name) for each in fields(used)})
    seen = _watched(plan, prepared, settings, config.train.learning_rate)
    shown = {"learning_rate": config.train.learning_rate, "weight_decay": config.train.weight_decay, **asdict(used)}
    return {
        "plan": asdict(plan),
        "settings": shown,
        "left": sum(seen["stationarity"]) / len(seen["stationarity"]),
        "stationarity": seen["stationarity"],
        "noise": seen["noise"],
    }


def _rows(run: Record) -> Iterator[Record]:
    """A run after some numbers of rounds, with the constants of the whole run."""
    plan, constants, seen = run["plan"], run["constants"], run["trajectory"]
    known = constants["smoothness"], constants["rate"]
    for rounds in dict.fromkeys([*(each for each in _AFTER if each < plan["rounds"]), plan["rounds"]]):
        start, steps = seen["potential"][0], plan["local_steps"]
        left = sum(seen["stationarity"][:rounds]) / rounds
        noise = sum(seen["noise"][:rounds]) / rounds
        bound = terms(start - constants["lowest"], *known, constants["noise"], run["allowed"][:rounds], steps)
        by_norm = terms(0.0, *known, 0.0, run["allowed_by_norm"][:rounds], steps)["drift"]
        measured = terms(start - seen["potential"][rounds], *known, noise, seen["drift"][:rounds], steps)
        yield {
            **setting_of(plan), "rounds": rounds, "left": left,
            **{f"bound_{term}": own for term, own in bound.items()},
            **{f"real_{term}": own for term, own in measured.items()},
            "drift_by_norm": by_norm, "bound_over_left": bound["total"] / left, "seed": plan["seed"],
        }  # fmt: skip


def setting_of(plan: Record) -> Record:
    """λ and h, as tables show them."""
    return {"strength": plan["strength"], "refresh": "never" if plan["refresh"] >= NEVER else str(plan["refresh"])}


def _read(file: Path, dataset: str, settings: Record) -> Record:
    """The document in a file, or an empty one. Runs depend on these settings of the data set and on their plan."""
    empty = {"schema": SCHEMA, "dataset": dataset, "settings": settings, "rows": [], "runs": [], "practice": []}
    if not file.exists():
        return empty
    try:
        document: Record = json.loads(file.read_text(encoding="utf-8"))
        schema, before = document["schema"], document.get("settings", {})
        now = {key: settings.get(key) for key in before}  # a setting that is newer than the file had its default
        other = [f"{key} {own!r}, now {now[key]!r}" for key, own in before.items() if now[key] != own]
        if schema != SCHEMA:
            raise ValueError(f"got schema {schema!r}, expected {SCHEMA}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: is no document of convergence of this version ({error}); move it away") from error
    if other:
        raise UsageError(f"{file}: was measured with {'; '.join(other)}; name another --out, or move it away")
    return {**empty, **document, "rows": [row for run in document.get("runs", ()) for row in _rows(run)]}


def _write(file: Path, document: Record) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".tmp")  # a crash leaves the old file or the new one
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, file)
