"""The configuration of a run: settings are read, checked (all errors at once) and written here.

The first of these sources that has a value decides: `--set` and options, or keywords in Python; the user's TOML file;
the shipped defaults of the data set and method (`pfedlms/configs/DATASET-METHOD.toml`, else that of a related data set,
then `DATASET.toml`); the defaults of `schema`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pfedlms.data.sources import DATASETS
from pfedlms.errors import ConfigError, did_you_mean
from pfedlms.experiment.plugins import find_method
from pfedlms.experiment.rules import contradictions
from pfedlms.experiment.schema import SECTIONS, DataSection, ModelSection, RunSection, suggest
from pfedlms.methods import METHODS
from pfedlms.settings import find_problems, parse, to_python_value, type_name
from pfedlms.train_settings import TrainSettings

Tables = dict[str, dict[str, Any]]
"""Values by section and key."""

SCHEMA = 1
RELATIVES = {"svhn": "cifar10", "cifar100": "cifar10"}
"""Data sets without shipped settings for methods, and the similar data set whose settings they take."""
REMOVED = (("run", "fast", False),)
"""Section, key and value of settings that the last version stored and this one no longer has. With that value they
changed nothing, so a stored configuration is read without them; any other value is refused as an unknown setting."""


@dataclass(frozen=True)
class Config:
    """A complete, valid configuration of one run."""

    method: str = "pfedlms"
    settings: Any = None
    data: DataSection = field(default=DataSection())
    model: ModelSection = field(default=ModelSection())
    train: TrainSettings = field(default=TrainSettings())
    run: RunSection = field(default=RunSection())
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The keys, `section.key`, that the user has set to another value than their default, shipped defaults included;
    empty for a run that is resumed."""

    def tables(self) -> Tables:
        """All values by section and key, as in a TOML file."""
        return {
            "data": asdict(self.data),
            "model": asdict(self.model),
            "train": asdict(self.train),
            "method": {"name": self.method, **asdict(self.settings)},
            "run": asdict(self.run),
        }

    def flat(self) -> dict[str, Any]:
        """All values by `section.key`."""
        return {f"{section}.{key}": value for section, keys in self.tables().items() for key, value in keys.items()}

    def to_toml(self) -> str:
        """The file that runs this configuration again."""
        lines = ["# pfedlms run config.toml --out DIR", f"schema = {SCHEMA}"]
        for section, values in self.tables().items():
            lines += ["", f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"

    def with_run(self, **values: Any) -> Config:
        return replace(self, run=replace(self.run, **values))

    def with_cohort_size_of(self, checkpoint: Mapping[str, Any] | None) -> Config:
        """With the cohort size of a checkpoint, unless the user sets one: dropout depends on the groups of clients."""
        return self.with_run(cohort_size=self.run.cohort_size or (checkpoint["cohort_size"] if checkpoint else 0))

    def quiet(self) -> Config:
        """The configuration without its list of settings given, so that no warning about them is repeated."""
        return replace(self, given=frozenset())


# --- the keys of sections and methods


def setting_fields(methods: Iterable[Any]) -> dict[tuple[str, str], Field[Any]]:
    """The fields that declare keys, by section and key; where several methods have a key, that of the first. A method
    that does not exist has none; the check of a configuration reports it."""
    own = [("method", method.Settings) for name in methods if (method := find_method(name)) is not None]
    by_key: dict[tuple[str, str], Field[Any]] = {}
    for section, cls in [*SECTIONS.items(), *own]:
        for each in fields(cls):
            by_key.setdefault((section, each.name), each)
    return by_key


def tables_for_method(tables: Mapping[str, Any], method: str, methods: Sequence[str]) -> Tables:
    """The tables for one of several methods: the section [method] without keys that only other methods have, and on top
    of it the section with the method's own name, `[pfedlms]`. Sections of other methods are left out. Keys that no
    method has stay, for the check to report."""
    foreign = setting_fields(methods).keys() - setting_fields([method]).keys()
    common = {key: value for key, value in tables.get("method", {}).items() if ("method", key) not in foreign}
    rest = {section: values for section, values in tables.items() if section not in ("method", *METHODS)}
    return {**rest, "method": {**common, **tables.get(method, {}), "name": method}}


# --- tables


def merge(*layers: Mapping[str, Any]) -> Tables:
    """The layers merged key by key; where several have a key, the last one's value."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            merged[section] = {**merged.get(section, {}), **values} if isinstance(values, Mapping) else values
    return merged


def read_toml(path: str | Path | None) -> Tables:
    """A TOML file as tables, empty for None; raises ConfigError if it cannot be read."""
    if path is None:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin with a mark
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read as a TOML file of settings ({error.strerror})"]) from error
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, thousands of digits, deep nesting
        raise ConfigError([f"{path}: not a TOML file: {error}"]) from error
    loose = [key for key, value in tables.items() if key != "schema" and not isinstance(value, Mapping)]
    if loose:
        remedy = "each setting stands below its section, such as [train]; pfedlms settings lists them"
        raise ConfigError([f"{path}: {', '.join(loose)}: got a value, expected a section; {remedy}"])
    return tables


def as_toml(value: Any) -> str:
    """A value as JSON writes it, but for the one character that TOML wants escaped and JSON does not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def shipped_defaults(dataset: Any, method: Any) -> Tables:
    """Shipped defaults for a data set; over them those for the method on a related data set, then on this one."""
    tables: Tables = {}
    if not isinstance(dataset, str) or dataset not in DATASETS:
        return tables
    folder = resources.files("pfedlms") / "configs"
    for stem in (dataset, f"{RELATIVES.get(dataset)}-{method}", f"{dataset}-{method}"):
        file = folder / f"{stem}.toml"
        if file.is_file():
            tables = merge(tables, tomllib.loads(file.read_text(encoding="utf-8")))
    tables.pop("schema", None)
    return tables


def from_keywords(methods: Sequence[str], settings: Mapping[str, Any]) -> Tables:
    """Keyword arguments as tables: `rounds=50`, `**{"train.rounds": 50}` or `train={"rounds": 50}`. Of settings of a
    method, `pfedlms={"strength": 0.05}` names the method. Full names are checked with the configuration."""
    places: dict[str, list[str]] = {"method": ["method.name"], "data_dir": ["data.dir"]}
    for section, key in setting_fields(methods):
        places.setdefault(key, []).append(f"{section}.{key}")
    tables: Tables = {}
    errors = []
    for name, value in settings.items():
        likely = [name] if "." in name else places.get(name, [])
        own: Tables = {}
        if isinstance(value, Mapping):
            own = {name: dict(value)}
        elif len(likely) == 1:
            section, _, key = likely[0].partition(".")
            own = {section: {key: value}}
        elif likely:
            errors.append(f"{name}: may mean {' or '.join(likely)}; give the full name")
        else:
            of = f" of {methods[0]}" if len(methods) == 1 else ""
            near = suggest(name, places)
            remedy = near if near.startswith("did") else "pfedlms settings lists them all, with their methods"
            errors.append(f"{name}: unknown setting{of}; {remedy}")
        for section, values in own.items():
            known = tables.get(section, {})
            twice = [key for key in values if key in known and known[key] != values[key]]
            errors += [f"{section}.{key}: got {known[key]!r} and {values[key]!r}; give one" for key in twice]
        tables = merge(tables, own)
    if errors:
        raise ConfigError(errors)
    return tables


def from_texts(methods: Sequence[str], texts: Sequence[str]) -> Tables:
    """Texts `key=value` as tables: keywords whose values take the type of their settings, the same in every method."""
    parts = {text: text.partition("=") for text in texts}
    if errors := [text for text, (_, equals, _) in parts.items() if not equals]:
        raise ConfigError([f"got {text!r}, expected a setting and its value, as in train.rounds=50" for text in errors])
    given: dict[str, str] = {}
    for key, _, value in parts.values():
        if (earlier := given.setdefault(key.strip(), value.strip())) != value.strip():
            raise ConfigError([f"{key.strip()}: got {earlier!r} and {value.strip()!r}; give one"])
    tables = from_keywords(methods, given)
    declared = setting_fields(methods)
    for section, values in tables.items():
        for key, value in values.items():
            place = ("method" if section in METHODS else section, key)
            values[key] = parse(declared[place], value) if place in declared else value
    return tables


def method_in(file: str | Path | None) -> str:
    """The method that a TOML file names: its keys must be known before the file is checked."""
    return str(read_toml(file).get("method", {}).get("name", "pfedlms"))


# --- from tables to a configuration


def load_config(
    file: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Read a TOML file, put `overrides` (by section and key) on top and check everything; raises ConfigError with every
    problem. A file `stored` with a run is complete, so it does not tell which of its keys the user has given."""
    given = merge(read_toml(file), overrides or {})
    schema: Any = given.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise ConfigError([f"schema: got {schema!r}, expected {SCHEMA}; the settings are of another version"])
    method = given.get("method", {}).get("name", "pfedlms")
    cls = find_method(method)
    if cls is None:
        own = "one of your own takes --import MODULE; several are compared: pfedlms compare"
        raise ConfigError([f"method.name: got {method!r}; {did_you_mean(str(method), METHODS)}; {own}"])
    given = tables_for_method(given, method, [method])
    del given["method"]["name"]
    for section, values in given.items():
        given[section] = {
            key: to_python_value(value)
            for key, value in values.items()
            if not (stored and (section, key, value) in REMOVED)
        }
    declared = {**SECTIONS, "method": cls.Settings}
    defaults = {section: {each.name: each.default for each in fields(cls)} for section, cls in declared.items()}
    base = merge(defaults, shipped_defaults(given.get("data", {}).get("dataset", "digits"), method))
    tables = merge(base, given)
    unknown = [section for section in given if section not in declared]
    errors = [f"[{section}]: unknown section; {did_you_mean(section, declared)}" for section in unknown]
    for section, cls in declared.items():
        errors += find_problems(section, cls, given.get(section, {}), suggest)
    errors += contradictions(tables)
    if errors:
        raise ConfigError(errors)
    explicit = {
        f"{section}.{key}"
        for section, values in given.items()
        for key, value in values.items()
        if not stored and value != base[section][key]
    }
    tables = merge(tables, {"data": default_constants(tables["data"])})
    sections = {section: _build(cls, tables[section]) for section, cls in declared.items()}
    return Config(method=method, settings=sections.pop("method"), given=frozenset(explicit), **sections)


def default_constants(data: Mapping[str, Any]) -> dict[str, str]:
    """`mean` and `std` of a named data set, unless the user gives others."""
    if data["dataset"] not in DATASETS or data["mean"]:
        return {}
    source = DATASETS[data["dataset"]]
    return {"mean": format_constants(source.mean), "std": format_constants(source.std)}


def format_constants(numbers: Sequence[float]) -> str:
    """The text `0.4914, 0.4822, 0.4465`; `rules.parse_constants` reads back the same numbers."""
    return ", ".join(repr(float(number)) for number in numbers)


def _build(declared: type[Any], values: Mapping[str, Any]) -> Any:
    types = {key.name: type_name(key) for key in fields(declared)}
    return declared(**{key: float(value) if types[key] == "float" else value for key, value in values.items()})
