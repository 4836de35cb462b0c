"""The cells of the studies in docs/results.md, group by group. A cell is one training run: a data set, how its clients
are set up, a method or variant, and a seed.

    python benchmarks/cells.py mnist fmnist cifar10      # stc at the bytes of sketchvote, checked
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import field
import regimes  # which makes `papers` known
from papers.pfedlms.experiments import EXPERIMENTS, equal_rate, settings_of, taken

from pfedlms import Config, load_config
from pfedlms.data import DATASETS

OWN = {
    "obcsaa": ("sparsity", (0.03, 0.1, 0.3, 1.0)),
    "obda": ("step", (1e-3, 3e-3, 1e-2, 3e-2)),
    "fedproto": ("strength", (1e-2, 0.1, 1.0, 10.0)),
    "zsign": ("sigma", (0.03, 0.1, 0.3)),
    "pfed1bs": ("strength", (5e-3, 5e-2, 0.5, 5.0)),
    "pfedlms": ("strength", (0.01, 0.05, 0.1, 0.2)),
}
"""The setting of each method that is chosen by validation accuracy, and where the search begins."""
REST = ("obda", "obcsaa", "obcsaa:downlink=sum", "fedproto", "eden", "zsign", "zsign:downlink=sum", "pfed1bs",
        "pfed1bs@pfedlms", "pfedlms@pfed1bs")  # fmt: skip
"""Rows of the paper's tables that `tables-DATASET` does not have."""
SEEDS = (0, 1, 2)
SWEEP_SEED = 10  # takes no part in the tables
HELD_OUT = {"data.alpha": 0.5, "data.validation": 0.2}
"""What cells have by which a setting is chosen."""
STEPS = (1.0, 1.5, 2.0, 3.0)
RATES = (0.03, 0.1, 0.3, 1.0)
RATED = ("local", "fedavg", "pfedlms", "sketchvote", "sketchmean", "stc:gain=3")
SAMPLED = ("local", "fedavg", "pfedlms", "pfed1bs", "eden", "zsign", "obcsaa", "obda", "fedproto")


@dataclass(frozen=True)
class Cell:
    """One training run; `settings` are on top of what is shipped for the data set and method, by section.key."""

    group: str
    dataset: str
    setup: str
    """How clients are set up, the same for all methods that are compared."""
    label: str
    """Method or variant, with what was changed of it."""
    seed: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    priority: int = 0
    """Those with the smallest number are run first."""
    as_ratio: float = 0
    """For stc: as many bytes as sketchvote has at this ratio."""
    model: str = ""
    """A model of variants.py instead of the data set's own."""

    @property
    def name(self) -> str:
        label = re.sub(r"[^\w.=+-]+", "-", self.label)
        return f"{self.dataset}_{self.setup}_{label}_s{self.seed}"

    def config(self, directory: str = "", **run: Any) -> Config:
        """The whole configuration; `directory` has the data, `run` are settings of how it is executed."""
        chosen = dict(self.settings)
        if self.as_ratio:
            chosen["method.sparsity"] = equal_sparsity(self.dataset, self.as_ratio)
        tables: dict[str, dict[str, Any]] = {
            "data": {"dataset": self.dataset, "dir": directory},
            "run": {"seed": self.seed, **run},
        }
        if self.model:
            tables["model"] = {"name": "custom"}
        for key, value in chosen.items():
            section, _, name = key.partition(".")
            tables.setdefault(section, {})[name] = value
        return load_config(None, tables)


def data_folder(directory: str, dataset: str) -> str:
    """`directory` itself, or the folder in it that is named as the data set."""
    own = Path(directory, dataset)
    return str(own) if directory and own.is_dir() else directory


def size(config: Config) -> float:
    """About how long a run takes, compared with others."""
    train = config.train
    steps = train.rounds * train.local_steps * config.data.clients * train.participation
    return steps * (1 if config.model.name == "dnn" else 10)


def compressed(ratios: Sequence[float]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """sketchvote at some ratios and stc at the same bytes: label, settings, ratio to be equal to."""
    for ratio in ratios:
        yield f"sketchvote-r{ratio:g}", {"method.name": "sketchvote", "method.ratio": ratio}, 0
        yield f"stc-as-r{ratio:g}", {"method.name": "stc"}, ratio


def tables(dataset: str, step: float | None) -> list[Cell]:
    """All methods at two α; without a server step that was chosen, without FedAvg at it."""
    baselines = [(name, {"method.name": name}, 0.0) for name in ("local", "fedavg", "pfedlms")]
    if step not in (None, 1):
        baselines.append((f"fedavg-step{step:g}", {"method.name": "fedavg", "method.server_step": step}, 0.0))
    cells = []
    for alpha, ratios, priority in ((0.5, (0.1, 0.05), 0), (0.1, (0.1, 0.05), 1), (0.5, (0.2, 0.02), 2)):
        for label, settings, equal in [*(baselines if priority < 2 else []), *compressed(ratios)]:
            cells += [
                Cell(f"tables-{dataset}", dataset, f"a{alpha:g}", label, seed, {"data.alpha": alpha, **settings},
                     priority, equal)
                for seed in SEEDS
            ]  # fmt: skip
    return cells


def paper(dataset: str) -> list[Cell]:
    """The paper's methods that `tables` leaves out, and those at each other's bytes, at both α."""
    return [
        Cell(f"paper-{dataset}", dataset, f"a{alpha:g}", row, seed, {"data.alpha": alpha, **by_key(dataset, row)})
        for seed, alpha, row in product(SEEDS, (0.5, 0.1), REST)
    ]


HUNDRED = ("local", "fedavg", "eden", "pfed1bs", "pfedlms", "sketchvote")
"""Rows of the paper's tables on CIFAR-100 with vgg11, whose runs take eight times as long as those with vgg8."""


def paper_cifar100() -> list[Cell]:
    """The paper's tables on CIFAR-100: all rows with vgg8 (three seeds), ablation and thresholds with it (one), some
    rows with vgg11 (two). Sums instead of models as answers are left out: they change bytes alone."""
    small = [row.variant for row in EXPERIMENTS["table1"].of("cifar100") if "downlink" not in row.variant]
    along = [row.variant for name in ("ablation", "thresholds") for row in EXPERIMENTS[name].of("cifar100")]
    wanted = [("vgg8", alpha, row, seed) for seed, alpha, row in product(SEEDS, (0.5, 0.1), small)]
    wanted += [("vgg8", 0.5, row, 0) for row in dict.fromkeys(along) if row not in (*small, "pfedlms:thresholds=7")]
    wanted += [("vgg11", alpha, row, seed) for seed, alpha, row in product(SEEDS[:2], (0.5, 0.1), HUNDRED)]
    own = {(model, row): by_key(f"cifar100/{model}", row) for model, _, row, _ in wanted}
    return [
        Cell("paper-cifar100", "cifar100", f"{model}-a{alpha:g}", row, seed,
             {"model.name": model, "data.alpha": alpha, **own[model, row]}, seed + 10 * (model == "vgg11"))
        for model, alpha, row, seed in wanted
    ]  # fmt: skip


def effects(dataset: str) -> list[Cell]:
    """The paper's ablation and the figures along one setting of pFedLMS, but for what is shipped: `tables` has that."""
    shipped, cells = by_key(dataset, "pfedlms"), {}
    for seed, name in product(SEEDS, ("ablation", "thresholds", "refresh", "lambda")):
        experiment = EXPERIMENTS[name]
        for row in experiment.of(dataset) if dataset in experiment.datasets else ():
            own = {"data.alpha": experiment.alpha, **by_key(dataset, row.variant)}
            cell = Cell(f"effects-{dataset}", dataset, f"a{experiment.alpha:g}", row.variant, seed, own, priority=1)
            plain = replace(cell, settings={"data.alpha": experiment.alpha, **shipped})
            if cell.config() != plain.config():
                cells[cell.name] = cell
    return list(cells.values())


def budget(dataset: str) -> list[Cell]:
    """FedAvg for as many rounds as the bytes of others pay for, at least one; and one round with as many local steps in
    all as the others take: E before the only exchange and E after it."""
    shared = {"data.alpha": 0.5, **FEDAVG, "run.evaluate_every": 1}
    train = load_config(None, {"data": {"dataset": dataset}}).train
    paid = [train.rounds * taken(dataset, other) // taken(dataset, "fedavg") for other in ("sketchvote", "pfedlms")]
    rows = {f"fedavg-rounds{own}": {"train.rounds": own} for own in sorted({max(1, each) for each in paid})}
    steps = (train.rounds + 1) * train.local_steps // 2
    rows[f"fedavg-rounds1-steps{steps}"] = {"train.rounds": 1, "train.local_steps": steps}
    return [
        Cell(f"budget-{dataset}", dataset, "a0.5", label, seed, {**shared, **own})
        for label, own in rows.items() for seed in SEEDS
    ]  # fmt: skip


def longer(dataset: str) -> list[Cell]:
    """FedAvg with the most rounds and local steps that the paper's range has."""
    settings = {"data.alpha": 0.5, **FEDAVG, "train.rounds": 350, "train.local_steps": 50}
    label = "fedavg-rounds350-steps50"
    return [Cell(f"longer-{dataset}", dataset, "a0.5", label, seed, settings, priority=1) for seed in SEEDS]


def once(dataset: str) -> list[Cell]:
    """w⁰ and E steps, what P-acc of a shared model begins with: `local`, half of them before the only round and half in
    it."""
    steps = load_config(None, {"data": {"dataset": dataset}}).train.local_steps
    settings = {"method.name": "local", "train.rounds": 1, "train.local_steps": steps // 2}
    return [
        Cell(f"once-{dataset}", dataset, f"a{alpha:g}", f"local-steps{steps}", seed, {"data.alpha": alpha, **settings})
        for alpha in (0.5, 0.1) for seed in SEEDS
    ]  # fmt: skip


def sampled(dataset: str) -> list[Cell]:
    """A fifth of the clients in a round."""
    return [
        Cell(f"sampled-{dataset}", dataset, f"n{clients}", method, seed,
             {"data.alpha": 0.5, "data.clients": clients, "train.participation": 0.2, "method.name": method})
        for clients in ((20,) if dataset == "digits" else (20, 100)) for seed in SEEDS for method in SAMPLED
    ]  # fmt: skip


def rates(dataset: str) -> list[Cell]:
    """Learning rates, with data set aside; all methods of a table have the same."""
    held_out = {"data.validation": 0.2, "run.evaluate_every": 5, "run.everyone": False}
    shares = {"sketchmean": {"method.ratio": 0.1, "method.answer": 0.005}}  # rows are older than its default of 0
    return [
        Cell(f"rates-{dataset}", dataset, "a0.5", f"{variant}-rate{rate:g}", seed,
             {**held_out, **by_key(dataset, variant), **shares.get(variant, {}), "train.learning_rate": rate})
        for rate in RATES for variant in RATED for seed in range(SWEEP_SEED, SWEEP_SEED + 5)
    ]  # fmt: skip


def by_key(dataset: str, variant: str) -> dict[str, Any]:
    """The settings of a variant of a method, by section.key."""
    tables = settings_of(dataset, variant)
    return {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def own_settings(dataset: str, values: Mapping[str, Sequence[float]]) -> list[Cell]:
    """Methods with values of the setting that is to be chosen, with data set aside."""
    return [
        Cell(f"own-{dataset}", dataset, "a0.5", f"{method}:{OWN[method][0]}={value:g}", SWEEP_SEED,
             {**HELD_OUT, "method.name": method, f"method.{OWN[method][0]}": value}, priority=-1)
        for method, given in values.items() for value in given
    ]  # fmt: skip


def equal(dataset: str) -> list[Cell]:
    """λ of pFedLMS and pFed1BS at each other's bytes, as multiples of what is shipped, with data set aside."""
    cells = []
    for variant in ("pfed1bs@pfedlms", "pfedlms@pfed1bs"):
        own = by_key(dataset, variant)
        shipped = load_config(None, {"data": {"dataset": dataset}, "method": {"name": own["method.name"]}}).settings
        for times in (0.25, 1.0, 4.0):
            settings = {**HELD_OUT, **own, "method.strength": times * shipped.strength}
            cells.append(Cell(f"equal-{dataset}", dataset, "a0.5", f"{variant}:{times:g}", SWEEP_SEED, settings))
    return cells


def sweep(dataset: str, steps: Sequence[float]) -> list[Cell]:
    """FedAvg's server step, to be chosen by validation accuracy."""
    return [
        Cell(f"sweep-{dataset}", dataset, "a0.5", f"fedavg-step{step:g}", SWEEP_SEED,
             {**HELD_OUT, **FEDAVG, "method.server_step": step})
        for step in steps
    ]  # fmt: skip


def gains(dataset: str) -> list[Cell]:
    """sketchvote's own settings, to be chosen by validation accuracy; those at the end go beyond the edge at which the
    best of the others lay on CIFAR-10."""
    return [
        Cell(f"gains-{dataset}", dataset, "a0.5", f"sketchvote-r0.1-gain{gain:g}-allocation{share:g}", SWEEP_SEED,
             {**HELD_OUT, **SKETCHVOTE, "method.gain": gain, "method.allocation": share}, priority=-1)
        for share, gain in [*product((1.0, 0.7), (1.0, 1.5, 2.0, 3.0)), (0.7, 4.5), *product((0.5,), (2.0, 3.0, 4.5))]
    ]  # fmt: skip


# As it is where nothing was chosen for a data set: limits and variants are then those of one method.
SKETCHVOTE = {"method.name": "sketchvote", "method.ratio": 0.1, "method.gain": 1.0, "method.allocation": 1.0}
FEDAVG = {"method.name": "fedavg"}
MANY = {"data.clients": 100}
FEW = {**MANY, "train.participation": 0.1}
# What changes FedAvg too: name, settings, and the ratios of sketchvote beside it.
SETUPS: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "100-clients": (MANY, (0.1,)),
    "10-of-100": (FEW, (0.1, 0.2, 0.5)),
    "a0.05": ({"data.alpha": 0.05}, (0.1,)),
    "iid": ({"data.alpha": 1e4}, (0.1,)),
    "E5": ({"train.local_steps": 5}, (0.1,)),
    "E100": ({"train.local_steps": 100}, (0.1,)),
}
ALONE: dict[str, dict[str, Any]] = {
    "sketchvote-r0.02": {"method.ratio": 0.02},
    "sketchvote-r0.01": {"method.ratio": 0.01},
    "sketchvote-r0.005": {"method.ratio": 0.005},
    "sketchvote-r0.1-gain0.5": {"method.gain": 0.5},
    "sketchvote-r0.1-gain1.5": {"method.gain": 1.5},
    "sketchvote-r0.1-gain3": {"method.gain": 3.0},
    "sketchvote-r0.1-refresh5": {"method.refresh": 5},
    "sketchvote-r0.1-allocation0.7": {"method.allocation": 0.7},
}


def limits(dataset: str) -> list[Cell]:
    """Where sketchvote gets worse, and what its settings do."""
    cells = []
    for seed in SEEDS[:2]:
        for setup, (settings, ratios) in SETUPS.items():
            cells.append(Cell("limits", dataset, setup, "fedavg", seed, {**settings, **FEDAVG}))
            for ratio in ratios:
                own = {**settings, **SKETCHVOTE, "method.ratio": ratio}
                cells.append(Cell("limits", dataset, setup, f"sketchvote-r{ratio:g}", seed, own))
                if "train.participation" in settings:
                    sparse = {**settings, "method.name": "stc"}
                    cells.append(Cell("limits", dataset, setup, f"stc-as-r{ratio:g}", seed, sparse, 0, ratio))
        for label, settings in ALONE.items():
            cells.append(Cell("limits", dataset, "a0.5", label, seed, {**SKETCHVOTE, **settings}))
    return cells


def limits_cifar10() -> list[Cell]:
    """Without batch norm, and with rows of the sketch given to small layers."""
    compared = {"local": {"method.name": "local"}, "fedavg": FEDAVG, "sketchvote-r0.1": SKETCHVOTE}
    cells = [
        Cell("limits-cifar10", "cifar10", "group-norm", label, 0, settings, model="vgg8-group-norm")
        for label, settings in compared.items()
    ]
    shared_out = {**SKETCHVOTE, "method.allocation": 0.7}
    return [*cells, Cell("limits-cifar10", "cifar10", "a0.5", "sketchvote-r0.1-allocation0.7", 0, shared_out)]


def plain(dataset: str) -> list[Cell]:
    """sketchvote with gain and allocation 1, beside `tables`, which has those that were chosen."""
    ratios = {0.5: (0.1, 0.05)} if dataset == "cifar10" else {0.5: (0.2, 0.1, 0.05, 0.02), 0.1: (0.1, 0.05)}
    return [
        Cell(f"plain-{dataset}", dataset, f"a{alpha:g}", f"sketchvote-r{ratio:g}", seed,
             {"data.alpha": alpha, **SKETCHVOTE, "method.ratio": ratio})
        for alpha, own in ratios.items() for ratio in own for seed in SEEDS
    ]  # fmt: skip


def variants(dataset: str) -> list[Cell]:
    """Votes weighted by scales, and residuals of clients that were absent."""
    cells = []
    weighted = {**SKETCHVOTE, "method.name": "sketchvote-weighted"}
    forgetful = {**FEW, **SKETCHVOTE, "method.name": "sketchvote-forgetful"}
    for seed in SEEDS[:2]:
        for alpha in (0.5, 0.1, 0.05):
            for label, cap in (("cap3", 3.0), ("uncapped", 0.0)):
                own = {"data.alpha": alpha, **weighted, "method.cap": cap}
                cells.append(Cell("variants", dataset, f"a{alpha:g}", f"sketchvote-r0.1-{label}", seed, own))
        for ratio in (0.1, 0.5):
            for label, chosen in (("decayed", {}), ("dropped", {"method.decay": 1.0, "method.longest": 1})):
                own = {**forgetful, "method.ratio": ratio, **chosen}
                cells.append(Cell("variants", dataset, "10-of-100", f"sketchvote-r{ratio:g}-{label}", seed, own))
    return cells


def regime_cells(dataset: str, contests: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The tables of the regimes with what effort.py chose; 1 % of the clients with what was chosen for 10 %."""
    cells = []
    small = dataset in ("mnist", "fmnist")
    for rank, regime in enumerate(("10-of-100", "10-of-1000", "20-of-20") if small else ("10-of-100", "20-of-20")):
        chosen = {
            each["method"]: each["chosen"]
            for each in contests
            if (each["dataset"], each["regime"]) == (dataset, regime.replace("1000", "100"))
        }
        for seed, (label, own) in product(SEEDS, regimes.rows(dataset, regime, chosen).items()):
            settings = {**regimes.shared(dataset, regime), **own}
            late = 20 if label == "stc" else 0
            cells.append(Cell(f"regimes-{dataset}", dataset, regime, label, seed, settings, 3 * rank + seed + late))
    return cells


def server_cells(dataset: str, contests: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Momentum, Adam and shares of bytes as effort.py's trials are: half the rounds, with data set aside."""
    chosen = field.chosen(contests, dataset, "10-of-100")
    held_out = {**regimes.shared(dataset, "10-of-100"), "data.validation": 0.2, "train.rounds": 100}
    return [
        Cell(
            f"servers-{dataset}", dataset, "10-of-100", label, SWEEP_SEED, {**held_out, **own, "run.evaluate_every": 5}
        )
        for label, own in regimes.servers(dataset, chosen).items()
    ]


def field_cells(group: str, dataset: str, named: Iterable[field.Named]) -> list[Cell]:
    """Cells of field.py, one seed after the other."""
    return [
        Cell(group, dataset, setup, label, seed, settings, priority=seed)
        for (setup, label, settings), seed in product(named, SEEDS)
    ]


def options(dataset: str) -> list[Cell]:
    """Options that the papers' text leaves open, each beside what is shipped: OBCSAA's original decoder, one ρ for all
    layers, and running statistics of batch norm that are averaged."""
    rows: dict[str, dict[str, Any]] = {
        "obcsaa-biht": {"method.name": "obcsaa", "method.decoder": "biht"},
        "pfedlms-absolute0.01": {"method.name": "pfedlms", "method.absolute": True, "method.smoothing": 0.01},
        "pfedlms-absolute0.03": {"method.name": "pfedlms", "method.absolute": True, "method.smoothing": 0.03},
    }
    if dataset == "cifar10":
        rows = {"fedavg-shared-statistics": {**FEDAVG, "method.share_statistics": True}}
    setups = {"a0.5": {}, "10-of-100": FEW} if dataset == "cifar10" else {"a0.5": {}}
    return [
        Cell(f"options-{dataset}", dataset, setup, label, seed, {"data.alpha": 0.5, **clients, **own}, -len(clients))
        for setup, clients in setups.items() for seed in SEEDS for label, own in rows.items()
    ]  # fmt: skip


def regime_limits() -> list[Cell]:
    """Where sketchmean breaks; one seed each."""
    return [
        Cell("regime-limits", dataset, setup, label, 0, settings, model=model)
        for dataset, setup, label, settings, model in regimes.limits()
    ]


def group(
    name: str, steps: Mapping[str, float], swept: Sequence[float], on: str = "mnist",
    contests: Sequence[Mapping[str, Any]] = (),
) -> list[Cell]:  # fmt: skip
    """The cells of a group; `steps` are the server steps chosen for data sets, `on` the data set of limits and
    variants, `contests` what effort.py chose."""
    of_a_dataset: dict[str, Callable[[str], list[Cell]]] = {
        "tables": lambda dataset: tables(dataset, steps.get(dataset)),
        "plain": plain,
        "paper": lambda dataset: paper_cifar100() if dataset == "cifar100" else paper(dataset),
        "effects": effects,
        "budget": budget,
        "longer": longer,
        "once": once,
        "sampled": sampled,
        "rates": rates,
        "sweep": lambda dataset: sweep(dataset, swept),
        "gains": gains,
        "equal": equal,
        "options": options,
        "regimes": lambda dataset: regime_cells(dataset, contests),
        "servers": lambda dataset: server_cells(dataset, contests),
        "rivals": lambda dataset: field_cells(f"rivals-{dataset}", dataset, field.rivals(dataset, contests)),
        "bytes": lambda dataset: field_cells(f"bytes-{dataset}", dataset, field.budgets(dataset, contests)),
        "own": lambda dataset: own_settings(dataset, {method: values for method, (_, values) in OWN.items()}),
    }
    others = {
        "limits": lambda: limits(on),
        "limits-cifar10": limits_cifar10,
        "regime-limits": regime_limits,
        "speakers": lambda: field_cells("speakers", "shakespeare", field.speakers(contests)),
        "variants": lambda: variants(on),
    }
    kind, _, dataset = name.partition("-")
    if kind in of_a_dataset and dataset in DATASETS:
        return of_a_dataset[kind](dataset)
    if name not in others:
        known = [f"{kind}-{dataset}" for kind in of_a_dataset for dataset in DATASETS]
        raise SystemExit(f"group: got {name!r}, expected one of {', '.join([*known, *others])}")
    return others[name]()


def choice(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The server step with the best validation accuracy (mean of the last 10 evaluations) of a sweep's rows."""
    found = {
        row["config"]["method"]["server_step"]: row["summary"]["validation_accuracy"]["last10"]
        for row in rows
        if row["status"] == "finished"
    }
    return max(found, key=lambda step: (found[step], -step)) if found else None


def gain_and_allocation(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Those with the best validation accuracy (mean of the last 10 evaluations) of the rows of `gains-DATASET`."""
    best = max(rows, key=lambda row: row["summary"]["validation_accuracy"]["last10"])
    return best["config"]["method"]["gain"], best["config"]["method"]["allocation"]


def equal_sparsity(dataset: str, ratio: float) -> float:
    """The sparsity at which stc's messages are as large as sketchvote's at `ratio` on the data set's own model, as they
    are with allocation 1; with another they differ by rounding, and are smaller where a layer has no more rows."""
    return equal_rate(dataset, "stc", taken(dataset, "sketchvote", ratio=ratio, allocation=1.0))


def main() -> None:
    """Check that what is called equal is: bytes of a client in a round, up and down."""
    for dataset in sys.argv[1:]:
        for ratio in (0.2, 0.1, 0.05, 0.02):
            p = equal_sparsity(dataset, ratio)
            ours, theirs = taken(dataset, "sketchvote", ratio=ratio), taken(dataset, "stc", sparsity=p)
            print(f"{dataset:8s} ratio {ratio:4g}: {ours:6d} bytes   p {p:.5f}: {theirs:6d}   {theirs / ours - 1:+.3%}")


if __name__ == "__main__":
    main()
