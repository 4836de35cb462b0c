"""The configuration of a run: what can be set, one dataclass a section, every key documented where it is defined; how
it is read and checked, all errors at once; and whose each key is.

Values are taken from, later ones first: `--set` and options; the user's TOML file; the shipped defaults of the data
set and method (`pfedlms/configs/DATASET-METHOD.toml`, that of a related data set where none was chosen for this one,
then `DATASET.toml`); the defaults of the sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pfedlms.data.schemes import SCHEMES
from pfedlms.data.sources import DATASETS, PATHS, kind_of, meant_by
from pfedlms.errors import ConfigError, did_you_mean
from pfedlms.experiment.checks import contradictions
from pfedlms.experiment.layers import Tables, as_toml, given_in, merge, preset, read_toml, under_own_name
from pfedlms.methods import METHODS
from pfedlms.models.zoo import MODELS
from pfedlms.settings import as_plain, parse, problems, setting, type_name
from pfedlms.step.schedule import SHAPES

SCHEMA = 1

_MALFORMED = "--set"
"""Where texts that are no assignments wait to be reported."""
CUSTOM = "custom"
"""Stands in a config for data or a model that was given in Python."""


@dataclass(frozen=True)
class DataSection:
    """Who holds what."""

    dataset: str = setting(
        "digits",
        "data set by name or path",
        choices=lambda: [*DATASETS, *(f"{kind}:PATH" for kind in PATHS), CUSTOM],
        meant=meant_by,
    )
    dir: str = setting("", "folder with the data set's files; empty: the one that PFEDLMS_DATA names")
    image_size: int = setting(
        0, "images of folder:PATH are resized to this many pixels each way; 0: as they are", minimum=0, maximum=4096
    )
    label_column: str = setting("", "column of file:PATH with the class; empty: label, class, target or y")
    owner_column: str = setting(
        "", "column of file:PATH with the client that holds a sample; empty: client, user or client_id, if there is one"
    )
    partition: str = setting(
        "auto",
        "who gets what: Dirichlet(α) shares of each class, some classes a client, all alike, sizes by Dirichlet(α), or "
        "as the data say; auto: given where they say so, else dirichlet",
        choices=lambda: ["auto", *SCHEMES],
    )
    alpha: float = setting(
        0.5,
        "α of the Dirichlet partition; small: each client holds few classes (quantity: few clients hold most)",
        above=0,
    )
    classes_per_client: int = setting(2, "classes a client holds with partition = classes", minimum=1)
    clients: int = setting(
        20, "K, number of clients; as many as there are where the partition is given", minimum=1, maximum=(1 << 32) - 2
    )
    min_samples: int = setting(10, "smallest number of samples (train and test) a client may get", minimum=1)
    validation: float = setting(
        0.0,
        "share of each client's training samples set aside to choose settings by V-acc; they are not trained on and do "
        "not count in N_k; a client with one training sample sets nothing aside, V-acc is of the others; 0: none",
        minimum=0,
        below=1,
    )

    class_names: str = setting(
        "",
        "where nodes hold data of their own: the names of all classes in order, separated by commas, so that all "
        "number them alike",
    )
    sample_shape: str = setting(
        "", "where nodes hold data of their own: the shape of a sample, 3x32x32 for instance; 64 for rows of 64 numbers"
    )

    @property
    def title(self) -> str:
        """The data set's name, of a path the last part."""
        kind = kind_of(self.dataset)
        return Path(self.dataset.partition(":")[2]).stem or kind if kind else self.dataset


@dataclass(frozen=True)
class ModelSection:
    """What every client trains."""

    name: str = setting("dnn", "model by name", choices=lambda: [*MODELS, CUSTOM])
    hidden: int = setting(256, "width of dnn's hidden layer", minimum=1)


@dataclass(frozen=True)
class TrainSection:
    """How clients train, the same for every method."""

    rounds: int = setting(200, "R, communication rounds", minimum=1)
    participation: float = setting(
        1.0,
        "share of the clients that take part in a phase; max(1, round(share · K)) of them are drawn",
        above=0,
        maximum=1,
    )
    max_weight: float = setting(
        1.0,
        "f, largest share one client may have of all weight in an exchange: N_k counts as min(N_k, c), c the largest "
        "with c ≤ f · Σ min(N_j, c); with fewer than 1/f messages all weigh the same; 1: no limit",
        above=0,
        maximum=1,
    )
    local_steps: int = setting(20, "E, steps a client takes in a round", minimum=1)
    batch_size: int = setting(64, "samples of one step", minimum=1)
    learning_rate: float = setting(0.1, "η", above=0)
    momentum: float = setting(
        0.0, "momentum of the local steps; 0: none; adamw has moments of its own instead", minimum=0, maximum=1
    )
    weight_decay: float = setting(1e-4, "μ, for every method", minimum=0)
    optimizer: str = setting(
        "sgd",
        "the local steps; adamw (β 0.9 and 0.999, ε 1e-8, decay decoupled) wants a learning rate of 0.001 or so",
        choices=lambda: ["sgd", "adamw"],
    )
    clip: float = setting(
        0.0, "largest norm of a client's gradient, the method's pull included, decay not; 0: none", minimum=0
    )
    schedule: str = setting(
        "constant",
        "η over the rounds: as it is; half a cosine down to nearly 0 at the last round, so train.rounds cannot change "
        "on resume; or times train.decay every train.decay_every rounds",
        choices=lambda: list(SHAPES),
    )
    warmup: int = setting(0, "rounds in which η rises in a straight line, before its schedule; 0: none", minimum=0)
    decay: float = setting(0.1, "of the schedule step: what η is multiplied by", above=0, maximum=1)
    decay_every: int = setting(50, "of the schedule step: after how many rounds", minimum=1)
    loss: str = setting(
        "cross-entropy",
        "what local steps minimise, unless a loss is given in Python",
        choices=lambda: ["cross-entropy", CUSTOM],
    )
    metric: str = setting(
        "auto",
        "what is measured, unless a metric is given in Python: accuracy, or minus the loss where there are no classes",
        choices=lambda: ["auto", CUSTOM],
    )
    augment: str = setting(
        "none",
        "how training images are changed at random: moved by up to 4 pixels, mirrored, or both",
        choices=lambda: ["none", "crop", "flip", "crop+flip"],
    )
    patience: int = setting(
        0,
        "stop when V-acc has not risen for so many evaluations; needs data.validation; the best round so far is kept "
        "(best.pt); 0: never",
        minimum=0,
    )


@dataclass(frozen=True)
class RunSection:
    """How the run is executed and what is kept."""

    seed: int = setting(
        0,
        "names every random stream: partition, initial weights, batches, sketches",
        minimum=0,
        maximum=(1 << 63) - 1,
    )
    device: str = setting(
        "auto",
        "auto takes a GPU where there is one; cuda:N the one of that number, from 0",
        choices=lambda: ["auto", "cpu", "cuda", "cuda:N"],
    )
    threads: int = setting(0, "CPU threads; 0: as they are set, which is all unless changed", minimum=0, maximum=1024)
    out: str = setting("", "run directory; empty: a fresh one under runs/")
    evaluate_every: int = setting(1, "rounds between evaluations (the last round is always evaluated)", minimum=1)
    checkpoint_every: int = setting(10, "rounds between checkpoints (the last round always has one)", minimum=1)
    quorum: float = setting(
        0.5, "share of an exchange's messages that must be valid for the round to go on", minimum=0, maximum=1
    )
    timeout: float = setting(
        600.0, "on nodes: seconds they have for one trip; who needs longer is left out of it", above=0
    )
    lost: float = setting(
        0.0,
        "share of messages lost on the way, in each direction; for studies of unreliable links",
        minimum=0,
        maximum=1,
    )
    fast: bool = setting(
        False,
        "on a GPU: compile the model (instead of the stacked layers); other rounding, not reproducible to the bit; "
        "worth a try where it has layers without a rule of their own",
    )
    cohort_size: int = setting(0, "clients stacked together; 0: as many as fit in memory; 1: one by one", minimum=0)
    reference: bool = setting(
        False, "everything as it is defined, in plain PyTorch, one client after another: for checking; slow"
    )


@dataclass(frozen=True)
class Config:
    """A complete, valid configuration of one run."""

    method: str = "pfedlms"
    settings: Any = None
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    run: RunSection = RunSection()
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Which keys, `section.key`, somebody has set to something else than their default, shipped ones included; nobody
    knows that of a run that is gone on with."""

    def tables(self) -> Tables:
        """All keys with their values, as they stand in a TOML file."""
        return {
            "data": asdict(self.data),
            "model": asdict(self.model),
            "train": asdict(self.train),
            "method": {"name": self.method, **asdict(self.settings)},
            "run": asdict(self.run),
        }

    def to_toml(self) -> str:
        """The file that runs this configuration again."""
        lines = ["# pfedlms run config.toml --out DIR", f"schema = {SCHEMA}"]
        for section, values in self.tables().items():
            lines += ["", f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"

    def with_run(self, **values: Any) -> Config:
        return replace(self, run=replace(self.run, **values))


SECTIONS: dict[str, type[Any]] = {name: type(getattr(Config, name)) for name in ("data", "model", "train", "run")}


def owners(methods: Iterable[Any]) -> list[tuple[str, str, type[Any]]]:
    """Whose keys are whose, where `methods` are in question: section, method (or "all" of them) and the dataclass that
    declares the keys. A method that does not exist has none; the check of a configuration reports it."""
    return [
        *((section, "all", cls) for section, cls in SECTIONS.items()),
        *(("method", name, METHODS[name].Settings) for name in methods if name in list(METHODS)),
    ]


def keys(methods: Iterable[Any]) -> dict[tuple[str, str], Field[Any]]:
    """Every key by section and name; one that several methods have is the first's."""
    known: dict[tuple[str, str], Field[Any]] = {}
    for section, _, cls in owners(methods):
        for each in fields(cls):
            known.setdefault((section, each.name), each)
    return known


def of_method(name: str, methods: Iterable[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the values of a section [method], those of one of `methods`: without what only others know, but with what
    nobody knows, so that the check reports it."""
    others = keys(methods).keys() - keys([name]).keys()
    return {key: value for key, value in values.items() if ("method", key) not in others}


def of_others(key: str, method: Any) -> str | None:
    """What is wrong with a key that `method` does not have and other methods do: whose it is, and what `method` has."""
    if method not in list(METHODS) or ("method", key) in keys([method]):
        return None
    having = [name for name in METHODS if ("method", key) in keys([name])]
    if not having:
        return None
    own = ", ".join(each.name for each in fields(METHODS[method].Settings)) or "no settings of its own"
    return f"a setting of {', '.join(having)}, not of {method}, which has {own}"


def load_config(
    file: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Read a TOML file, put `overrides` (by section and key) on top and check it all; raises ConfigError with every
    problem found. A file that is `stored` with a run has every key, whoever gave it."""
    given = merge(read_toml(Path(file)) if file else {}, overrides or {})
    for section, values in given.items():
        if isinstance(values, Mapping):
            given[section] = {key: as_plain(value) for key, value in values.items()}
    schema: Any = given.pop("schema", SCHEMA)
    if schema != SCHEMA:
        what = "run directory" if stored else "config"
        raise ConfigError([f"schema: got {schema!r}, expected {SCHEMA}; the {what} is of another version of pfedlms"])
    method = given_in(given, "method", "name", "pfedlms")
    qualified = given.get(method, {}) if isinstance(method, str) else {}
    given = under_own_name(given, method)
    dataset = given_in(given, "data", "dataset", "digits")
    shipped = preset(dataset, method)
    tables = merge(shipped, given)
    if isinstance(tables.get("method"), Mapping):
        tables["method"] = {key: value for key, value in tables["method"].items() if key != "name"}
    classes = {section: cls for section, _, cls in owners([method])}
    found = [_as_written(problem, qualified, method) for problem in _problems(tables, classes, method)]
    found += contradictions(merge(_defaults(classes), tables))
    if "method" not in classes:
        found.append(f"method.name: got {method!r}; {did_you_mean(str(method), METHODS)}")
    if found:
        raise ConfigError(found)
    sections = {section: _build(cls, tables.get(section, {})) for section, cls in classes.items()}
    base = merge(_defaults(classes), shipped)
    explicit = {
        f"{section}.{key}"
        for section, values in tables.items()
        for key, value in values.items()
        if not stored and value != base[section][key]
    }
    return Config(method=method, settings=sections.pop("method"), given=frozenset(explicit), **sections)


def _defaults(classes: Mapping[str, type[Any]]) -> Tables:
    return {section: {each.name: each.default for each in fields(cls)} for section, cls in classes.items()}


def _as_written(problem: str, qualified: Mapping[str, Any], method: Any) -> str:
    """A problem of the section [method] under the name that the key was given: `pfedlms.strength`, say."""
    place, colon, text = problem.partition(": ")
    section, _, key = place.partition(".")
    own = section == "method" and isinstance(qualified, Mapping) and key in qualified
    return f"{method}.{key}{colon}{text}" if own else problem


def parse_overrides(assignments: Sequence[str]) -> Tables:
    """`section.key=value` texts as tables; a value takes the type its key has, which is the same in every method."""
    tables: Tables = {}
    for text in assignments:
        place, equals, value = text.partition("=")
        section, dot, key = place.strip().partition(".")
        if equals and dot and section and key:
            tables.setdefault(section, {})[key] = value.strip()
        else:
            tables.setdefault(_MALFORMED, {})[text] = ""  # reported with all other problems
    for (section, key), declared in keys(METHODS).items():
        for place in (section, *(METHODS if section == "method" else ())):
            if key in tables.get(place, {}):
                tables[place][key] = parse(declared, tables[place][key])
    return tables


def method_in(file: str | Path | None) -> str:
    """The method a TOML file names, so that its own keys are known before the whole is checked."""
    return str(given_in(read_toml(Path(file)) if file else {}, "method", "name", "pfedlms"))


def _problems(tables: Mapping[str, Any], classes: Mapping[str, type[Any]], method: Any) -> list[str]:
    """Everything wrong with `tables`, whose sections have the keys of `classes`, where `method` is chosen."""
    found = []
    names = [*SECTIONS, "method"]
    for section, values in tables.items():
        if section == _MALFORMED:
            example = "expected section.key=value, for example train.rounds=50"
            found += [f"--set: got {text!r}, {example}" for text in values]
        elif section in METHODS:
            found.append(f"[{section}]: settings of {section}, but the method is {method}; leave them out")
        elif section not in names:
            near = did_you_mean(section, [*names, *([method] if method in list(METHODS) else [])])
            found.append(f"[{section}]: unknown section; {near}")
        elif not isinstance(values, Mapping):
            found.append(f"{section}: got {values!r}, expected a section [{section}]")
        elif section in classes:
            misplaced = {key: of_others(key, method) for key in values} if section == "method" else {}
            found += [f"method.{key}: {whose}" for key, whose in misplaced.items() if whose]
            rest = {key: value for key, value in values.items() if not misplaced.get(key)}
            found += problems(section, classes[section], rest)
    return found


def _build(cls: type[Any], values: Mapping[str, Any]) -> Any:
    kinds = {each.name: type_name(each) for each in fields(cls)}
    return cls(**{key: float(value) if kinds[key] == "float" else value for key, value in values.items()})
