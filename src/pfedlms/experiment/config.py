"""The configuration of a run: how settings are read, checked (all errors at once) and written.

Values are taken from, later ones first: `--set` and options, or keywords in Python; the user's TOML file; the shipped
defaults of the data set and method (`pfedlms/configs/DATASET-METHOD.toml`, that of a related data set where none was
chosen for this one, then `DATASET.toml`); the defaults of `schema`.
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
from pfedlms.experiment.schema import SECTIONS, DataSection, ModelSection, RunSection, meant
from pfedlms.methods import METHODS
from pfedlms.settings import find_problems, parse, to_python_number, type_name
from pfedlms.train_settings import TrainSettings

Tables = dict[str, dict[str, Any]]
"""Values by section and key."""

SCHEMA = 1
RELATIVES = {"svhn": "cifar10", "cifar100": "cifar10"}
"""Data sets on which methods' settings were not chosen, and the one whose settings they take: images and models are
alike."""
BEFORE = {"train": {"floor": 0.0}}
"""What the last version did where its stored configurations have no such key."""


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
    """Which keys, `section.key`, the user has set to something else than their default, shipped ones included; empty
    for a run that is resumed."""

    def tables(self) -> Tables:
        """All keys with their values, as they stand in a TOML file."""
        return {
            "data": asdict(self.data),
            "model": asdict(self.model),
            "train": asdict(self.train),
            "method": {"name": self.method, **asdict(self.settings)},
            "run": asdict(self.run),
        }

    def flat(self) -> dict[str, Any]:
        """The same by `section.key`."""
        return {f"{section}.{key}": value for section, own in self.tables().items() for key, value in own.items()}

    def to_toml(self) -> str:
        """The file that runs this configuration again."""
        lines = ["# pfedlms run config.toml --out DIR", f"schema = {SCHEMA}"]
        for section, values in self.tables().items():
            lines += ["", f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"

    def with_run(self, **values: Any) -> Config:
        return replace(self, run=replace(self.run, **values))

    def grouped_as(self, checkpoint: Mapping[str, Any] | None) -> Config:
        """With cohorts of the size they had, where that depends on free memory: dropout depends on the grouping."""
        return self.with_run(cohort_size=self.run.cohort_size or (checkpoint["cohort_size"] if checkpoint else 0))

    def silenced(self) -> Config:
        """As if the user had given no setting: warnings about them have been given."""
        return replace(self, given=frozenset())


# --- which keys there are


def owners(methods: Iterable[Any]) -> list[tuple[str, str, type[Any]]]:
    """Which keys belong to what, for these methods: section, method (or "all" of them) and the dataclass that declares
    the keys. A method that does not exist has none; the check of a configuration reports it."""
    return [
        *((section, "all", declared) for section, declared in SECTIONS.items()),
        *(("method", name, found.Settings) for name in methods if (found := find_method(name)) is not None),
    ]


def keys(methods: Iterable[Any]) -> dict[tuple[str, str], Field[Any]]:
    """Every key by section and name; one that several methods have is the first one's."""
    known: dict[tuple[str, str], Field[Any]] = {}
    for section, _, declared in owners(methods):
        for each in fields(declared):
            known.setdefault((section, each.name), each)
    return known


def for_method(tables: Mapping[str, Any], method: Any, methods: Sequence[Any]) -> Tables:
    """Of the tables for several methods those for one of them: the section [method] without keys that only others have,
    and on top of it the section of the method's own name, `[pfedlms]`. Keys that nobody has stay, so that the check
    reports them."""
    own, shared = tables.get(method) if find_method(method) else None, tables.get("method", {})
    if not isinstance(shared, Mapping):
        return dict(tables)
    foreign = keys(methods).keys() - keys([method]).keys()
    left_out = {"method", *([method] if own is not None else [])}
    left_out |= {name for name in METHODS if len(methods) > 1 and name != method}
    rest = {section: values for section, values in tables.items() if section not in left_out}
    known = {key: value for key, value in shared.items() if ("method", key) not in foreign}
    named = {"method": {**known, "name": method}}
    return merge(rest, named, {"method": own} if own is not None else {})


def of_others(key: str, method: Any) -> str | None:
    """What is wrong with a key that `method` does not have and other methods do: whose it is, and what `method` has."""
    found = find_method(method)
    if found is None or ("method", key) in keys([method]):
        return None
    having = [name for name in METHODS if ("method", key) in keys([name])]
    if not having:
        return None
    own = ", ".join(each.name for each in fields(found.Settings)) or "no settings of its own"
    return f"a setting of {', '.join(having)}, not of {method}, which has {own}"


def nearest(key: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown key: what other tools call so, or the nearest spelling."""
    known = list(known)
    by_meaning = keyword(*(meant(key) or ".").split("."))
    return f"did you mean {by_meaning}?" if by_meaning in known else did_you_mean(key, known)


def _nearest_place(key: str, known: Iterable[str]) -> str:
    """Likewise in a file, where a key of another section may be meant."""
    place = meant(key)
    return f"did you mean {place}?" if place else did_you_mean(key, known)


# --- tables


def merge(*layers: Mapping[str, Any]) -> Tables:
    """All of them, key by key; where several have a key, the last one's value."""
    merged: dict[str, Any] = {}
    for top in layers:
        for key, value in top.items():
            below = merged.get(key, {})
            merged[key] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_toml(path: str | Path | None) -> Tables:
    """A TOML file as tables, nothing for None; raises ConfigError where it cannot be read."""
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        folder = "; a run's folder is for resume and show" if Path(path).is_dir() else ""
        raise ConfigError([f"{path}: cannot be read ({error.strerror}){folder}"]) from error
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, thousands of digits, deep nesting
        raise ConfigError([f"{path}: not a TOML file: {error}"]) from error


def as_toml(value: Any) -> str:
    """As JSON writes it, but for the one character that TOML wants escaped and JSON does not."""
    if isinstance(value, str):
        # Bytes of a path that are no UTF-8 (lone surrogates in Python) have no place in TOML; "?" keeps it readable.
        value = value.encode(errors="replace").decode()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def preset(dataset: Any, method: Any) -> Tables:
    """Shipped defaults for a data set, then those for a method on its relative, then on itself."""
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


def parse_overrides(assignments: Sequence[str]) -> Tables:
    """`section.key=value` texts as tables; a value takes the type its key has, which is the same in every method."""
    tables: Tables = {}
    wrong = []
    for text in assignments:
        place, equals, value = text.partition("=")
        section, dot, key = place.strip().partition(".")
        if equals and dot and section and key:
            tables.setdefault(section, {})[key] = value.strip()
        else:
            found = ".".join(places(METHODS).get(place.strip(), ())) or meant(place.strip())
            near = f"did you mean {found}={value}?" if equals and found else "for example train.rounds=50"
            wrong.append(f"--set: got {text!r}, expected section.key=value; {near}")
    if wrong:
        raise ConfigError(wrong)
    find_method(tables.get("method", {}).get("name"))
    for (section, key), declared in keys(METHODS).items():
        for place in (section, *(METHODS if section == "method" else ())):
            if key in tables.get(place, {}):
                tables[place][key] = parse(declared, tables[place][key])
    return tables


def keyword(section: str, key: str) -> str:
    """The name of a setting among keywords: its key, but one that says nothing by itself."""
    return "data_dir" if (section, key) == ("data", "dir") else key


def places(methods: Iterable[Any]) -> dict[str, tuple[str, str]]:
    """Section and key by the names that keywords may have: `learning_rate`, `train.learning_rate`, `method`."""
    known = keys(methods)
    plain = {keyword(section, key): (section, key) for section, key in known if key != "name"}
    return plain | {f"{section}.{key}": (section, key) for section, key in known} | {"method": ("method", "name")}


def from_keywords(methods: Sequence[str], settings: Mapping[str, Any]) -> Tables:
    """Keyword arguments as tables. `pfedlms={"strength": 0.05}` names the method that a setting is for."""
    known = places(methods)
    alone = methods[0] if len(methods) == 1 else None
    tables: Tables = {}
    unknown = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in (*SECTIONS, "method", *METHODS):
            tables = merge(tables, {key: value})
        elif key in known:
            section, name = known[key]
            tables.setdefault(section, {})[name] = _device_name(value) if name == "device" else value
        else:
            near = nearest(key, [name for name in known if "." not in name])
            near = "several runs are a study: pfedlms.study or pfedlms.compare" if key == "seeds" else near
            unknown.append(f"{key}: {of_others(key, alone) or f'unknown setting; {near}'}")
    if unknown:
        raise ConfigError(unknown)
    return tables


def _device_name(device: Any) -> Any:
    """A `torch.device` as the setting has it; there is only one CPU."""
    return ("cpu" if device.type == "cpu" else str(device)) if hasattr(device, "type") else device


def method_in(file: str | Path | None) -> str:
    """The method a TOML file names, so that its own keys are known before the whole is checked."""
    return str(_value_in(read_toml(file), "method", "name", "pfedlms"))


def _value_in(tables: Mapping[str, Any], section: str, key: str, default: str) -> Any:
    """One value that others depend on; a section that is no table is reported by the check."""
    values = tables.get(section, {})
    return values.get(key, default) if isinstance(values, Mapping) else default


# --- from tables to a configuration


def load_config(
    file: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Read a TOML file, put `overrides` (by section and key) on top and check it all; raises ConfigError with every
    problem found. A file that is `stored` with a run has every key, whether the user has set it or not."""
    given = merge(read_toml(file), overrides or {})
    for section, values in given.items():
        if isinstance(values, Mapping):
            given[section] = {key: to_python_number(value) for key, value in values.items()}
    schema: Any = given.pop("schema", SCHEMA)
    if schema != SCHEMA:
        what = "run directory" if stored else "config"
        raise ConfigError([f"schema: got {schema!r}, expected {SCHEMA}; the {what} is of another version of pfedlms"])
    method = _value_in(given, "method", "name", "pfedlms")
    own_section = given.get(method, {}) if isinstance(method, str) else {}
    given = for_method(given, method, [method])
    shipped = preset(_value_in(given, "data", "dataset", "digits"), method)
    tables = merge(shipped, BEFORE if stored else {}, given)
    if isinstance(tables.get("method"), Mapping):
        tables["method"] = {key: value for key, value in tables["method"].items() if key != "name"}
    declared = {section: cls for section, _, cls in owners([method])}
    base = merge({section: {each.name: each.default for each in fields(cls)} for section, cls in declared.items()},
                 shipped)  # fmt: skip
    found = _problems(tables, declared, method) + contradictions(merge(base, tables))
    if "method" not in declared:
        found.append(f"method.name: got {method!r}{_meant_method(str(method))}")
    found = [as_written(problem, method, own_section) for problem in found]
    if found:
        raise ConfigError(found)
    explicit = {
        f"{section}.{key}"
        for section, values in tables.items()
        for key, value in values.items()
        if not stored and value != base[section][key]
    }
    tables = merge(tables, {"data": constants_of(merge(base, tables)["data"])})
    sections = {section: _build(cls, tables.get(section, {})) for section, cls in declared.items()}
    return Config(method=method, settings=sections.pop("method"), given=frozenset(explicit), **sections)


def constants_of(data: Mapping[str, Any]) -> dict[str, str]:
    """`mean` and `std` of a data set by name, where the user gives no others."""
    if data["dataset"] not in DATASETS or data["mean"]:
        return {}
    source = DATASETS[data["dataset"]]
    return {"mean": as_constants(source.mean), "std": as_constants(source.std)}


def as_constants(numbers: Sequence[float]) -> str:
    """`0.4914, 0.4822, 0.4465`: read back to the same numbers."""
    return ", ".join(repr(float(number)) for number in numbers)


def as_written(problem: str, method: Any, own: Any) -> str:
    """A problem of the section [method] under the name that the key was given, `pfedlms.strength`, where it is among
    the method's `own`."""
    section, _, text = problem.partition(".")
    key = text.partition(":")[0]
    written = section == "method" and key != "name" and isinstance(own, Mapping) and key in own
    return f"{method}.{text}" if written else problem


def _problems(tables: Mapping[str, Any], declared: Mapping[str, type[Any]], method: Any) -> list[str]:
    """Everything wrong with `tables`, whose sections have the keys of `declared`, where `method` is chosen."""
    found = []
    names = [*SECTIONS, "method"]
    for section, values in tables.items():
        if section in METHODS:
            found.append(f"[{section}]: settings of {section}, but the method is {method}; leave them out")
        elif section not in names:
            near = did_you_mean(section, [*names, *([method] if method in list(METHODS) else [])])
            place = places([method]).get(section)
            if place and not isinstance(values, Mapping):
                found.append(f"{section}: got a key without a section, expected it below [{place[0]}]")
            else:
                found.append(f"[{section}]: unknown section; {near}")
        elif not isinstance(values, Mapping):
            found.append(f"{section}: got {values!r}, expected a section [{section}]")
        elif section in declared:
            misplaced = {key: of_others(key, method) for key in values} if section == "method" else {}
            found += [f"method.{key}: {whose}" for key, whose in misplaced.items() if whose]
            rest = {key: value for key, value in values.items() if not misplaced.get(key)}
            found += find_problems(section, declared[section], rest, _nearest_place)
    return found


def _meant_method(given: str) -> str:
    """What to do about a method that does not exist: one with settings, as comparisons name it, or an unknown name."""
    if "," in given and all(find_method(each) for each in given.split(",")):
        return f", expected one; several are compared: pfedlms compare --methods {given}; in Python pfedlms.compare"
    name, *texts = given.split(":")
    if find_method(name) is None or not texts:
        own = "a method of your own takes --import MODULE; in Python, import its module first"
        return f"; {did_you_mean(given, METHODS)}; {own}"
    known = places([name])
    parts = [text.partition("=") for text in texts]
    pairs = [(known.get(key, ("method", key)), value or "…") for key, _, value in parts]
    options = " ".join(f"--set {section}.{key}={value}" for (section, key), value in pairs)
    keywords = ", ".join(f"{keyword(section, key)}={value}" for (section, key), value in pairs)
    return f", expected the name alone; its settings stand apart: --method {name} {options}; in Python {keywords}"


def _build(declared: type[Any], values: Mapping[str, Any]) -> Any:
    kinds = {each.name: type_name(each) for each in fields(declared)}
    return declared(**{key: float(value) if kinds[key] == "float" else value for key, value in values.items()})
