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
from pfedlms.experiment.schema import SECTIONS, DataSection, ModelSection, RunSection, place_by_other_name
from pfedlms.methods import METHODS
from pfedlms.settings import find_problems, parse, to_python_number, type_name
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


def setting_classes(methods: Iterable[Any]) -> list[tuple[str, str, type[Any]]]:
    """The dataclasses that declare keys, each with its section and its method ("all" for the common sections). A method
    that does not exist has none; the check of a configuration reports it."""
    return [
        *((section, "all", declared) for section, declared in SECTIONS.items()),
        *(("method", name, method.Settings) for name in methods if (method := find_method(name)) is not None),
    ]


def setting_fields(methods: Iterable[Any]) -> dict[tuple[str, str], Field[Any]]:
    """The fields that declare keys, by section and key; where several methods have a key, that of the first."""
    by_key: dict[tuple[str, str], Field[Any]] = {}
    for section, _, declared in setting_classes(methods):
        for field_ in fields(declared):
            by_key.setdefault((section, field_.name), field_)
    return by_key


def tables_for_method(tables: Mapping[str, Any], method: Any, methods: Sequence[Any]) -> Tables:
    """The tables for one of several methods: the section [method] without keys that only other methods have, and on top
    of it the section with the method's own name, `[pfedlms]`. Keys that no method has stay, for the check to report."""
    own_section, common = tables.get(method) if find_method(method) else None, tables.get("method", {})
    if not isinstance(common, Mapping):
        return dict(tables)
    foreign = setting_fields(methods).keys() - setting_fields([method]).keys()
    left_out = {"method", *([method] if own_section is not None else [])}
    left_out |= {name for name in METHODS if len(methods) > 1 and name != method}
    rest = {section: values for section, values in tables.items() if section not in left_out}
    settings = {key: value for key, value in common.items() if ("method", key) not in foreign}
    own_tables = {"method": own_section} if own_section is not None else {}
    return merge(rest, {"method": {**settings, "name": method}}, own_tables)


def explain_foreign_key(key: str, method: Any) -> str | None:
    """For a key that other methods have, but not `method`: which methods have it, and which keys `method` has."""
    cls = find_method(method)
    if cls is None or ("method", key) in setting_fields([method]):
        return None
    owners = [name for name in METHODS if ("method", key) in setting_fields([name])]
    if not owners:
        return None
    own_keys = ", ".join(field_.name for field_ in fields(cls.Settings)) or "no settings of its own"
    return f"a setting of {', '.join(owners)}, not of {method}, which has {own_keys}"


def suggest_keyword(key: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown keyword: our name for what other tools call so, or the nearest spelling."""
    known = list(known)
    our_name = keyword(*(place_by_other_name(key) or ".").split("."))
    return f"did you mean {our_name}?" if our_name in known else did_you_mean(key, known)


def _suggest_place(key: str, known: Iterable[str]) -> str:
    """The same for a key in a file, where a key of another section may be meant."""
    place = place_by_other_name(key)
    return f"did you mean {place}?" if place else did_you_mean(key, known)


# --- tables


def merge(*layers: Mapping[str, Any]) -> Tables:
    """The layers merged key by key; where several have a key, the last one's value. A section that is no table stays as
    it is, for the check to report."""
    merged: dict[str, Any] = {}
    for top in layers:
        for key, value in top.items():
            below = merged.get(key, {})
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                merged[key] = {**below, **value}
            elif not isinstance(value, Mapping):
                merged[key] = value
    return merged


def read_toml(path: str | Path | None) -> Tables:
    """A TOML file as tables, empty for None; raises ConfigError if it cannot be read."""
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin with a mark
    except OSError as error:
        folder = "; a run's folder is for resume and show" if Path(path).is_dir() else ""
        raise ConfigError([f"{path}: cannot be read ({error.strerror}){folder}"]) from error
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, thousands of digits, deep nesting
        raise ConfigError([f"{path}: not a TOML file: {error}"]) from error


def as_toml(value: Any) -> str:
    """A value as JSON writes it, but for the one character that TOML wants escaped and JSON does not."""
    if isinstance(value, str):
        # Bytes of a path that are no UTF-8 (lone surrogates in Python) have no place in TOML; "?" keeps it readable.
        value = value.encode(errors="replace").decode()
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


def parse_overrides(assignments: Sequence[str]) -> Tables:
    """`section.key=value` texts as tables; a value takes the type its key has, which is the same in every method."""
    tables: Tables = {}
    errors = []
    for text in assignments:
        place, equals, value = text.partition("=")
        section, dot, key = place.strip().partition(".")
        if equals and dot and section and key:
            tables.setdefault(section, {})[key] = value.strip()
        else:
            likely = ".".join(keyword_places(METHODS).get(place.strip(), ())) or place_by_other_name(place.strip())
            remedy = f"did you mean {likely}={value}?" if equals and likely else "for example train.rounds=50"
            errors.append(f"--set: got {text!r}, expected section.key=value; {remedy}")
    if errors:
        raise ConfigError(errors)
    find_method(tables.get("method", {}).get("name"))
    for (section, key), declared in setting_fields(METHODS).items():
        for place in (section, *(METHODS if section == "method" else ())):
            if key in tables.get(place, {}):
                tables[place][key] = parse(declared, tables[place][key])
    return tables


def keyword(section: str, key: str) -> str:
    """The keyword for a setting: its key, except for `data.dir`, whose key alone says too little."""
    return "data_dir" if (section, key) == ("data", "dir") else key


def keyword_places(methods: Iterable[Any]) -> dict[str, tuple[str, str]]:
    """Section and key by the names that keywords may have: `learning_rate`, `train.learning_rate`, `method`."""
    places = setting_fields(methods).keys()
    short = {keyword(section, key): (section, key) for section, key in places if key != "name"}
    return short | {f"{section}.{key}": (section, key) for section, key in places} | {"method": ("method", "name")}


def ambiguity(key: str, places: Iterable[str]) -> str:
    """What is wrong with a keyword that a setting of the method and another setting share; empty if nothing is."""
    full = sorted(place for place in places if place.partition(".")[2] == key)
    return f"{key}: may mean {' or '.join(full)}; give the full name: **{{{full[0]!r}: …}}" if len(full) > 1 else ""


def from_keywords(methods: Sequence[str], settings: Mapping[str, Any]) -> Tables:
    """Keyword arguments as tables. `pfedlms={"strength": 0.05}` names the method that a setting is for."""
    places = keyword_places(methods)
    single_method = methods[0] if len(methods) == 1 else None
    tables: Tables = {}
    errors = []
    for key, value in settings.items():
        layer: Tables = {}
        if isinstance(value, Mapping) and key in (*SECTIONS, "method", *METHODS):
            layer = {key: dict(value)}
        elif key in places:
            if problem := ambiguity(key, places):
                errors.append(problem)
            section, name = places[key]
            layer = {section: {name: _device_name(value) if name == "device" else value}}
        if layer:
            ((section, values),) = layer.items()
            twice = [name for name in values if name in tables.get(section, {})]
            errors += [
                f"{section}.{name}: got {tables[section][name]!r} and {values[name]!r}; give one" for name in twice
            ]
            tables = merge(tables, layer)
        else:
            remedy = suggest_keyword(key, [name for name in places if "." not in name])
            remedy = "several runs are a study: pfedlms.study or pfedlms.compare" if key == "seeds" else remedy
            errors.append(f"{key}: {explain_foreign_key(key, single_method) or f'unknown setting; {remedy}'}")
    if errors:
        raise ConfigError(errors)
    return tables


def _device_name(device: Any) -> Any:
    """The value of `run.device` for a `torch.device`; there is only one CPU."""
    return ("cpu" if device.type == "cpu" else str(device)) if hasattr(device, "type") else device


def method_in(file: str | Path | None) -> str:
    """The method that a TOML file names: its keys must be known before the file is checked."""
    return str(_value_in(read_toml(file), "method", "name", "pfedlms"))


def _value_in(tables: Mapping[str, Any], section: str, key: str, default: str) -> Any:
    """One value that others depend on, or its default; the check reports a section that is no table."""
    values = tables.get(section, {})
    return values.get(key, default) if isinstance(values, Mapping) else default


# --- from tables to a configuration


def load_config(
    file: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Read a TOML file, put `overrides` (by section and key) on top and check everything; raises ConfigError with every
    problem found. A configuration that is `stored` with a run does not tell which of its keys the user has set."""
    given = merge(read_toml(file), overrides or {})
    for section, values in given.items():
        if isinstance(values, Mapping):
            given[section] = {
                key: to_python_number(value)
                for key, value in values.items()
                if not (stored and (section, key, value) in REMOVED)
            }
    schema: Any = given.pop("schema", SCHEMA)
    if schema != SCHEMA:
        what = "run directory" if stored else "config"
        raise ConfigError([f"schema: got {schema!r}, expected {SCHEMA}; the {what} is of another version of pfedlms"])
    method = _value_in(given, "method", "name", "pfedlms")
    own_section = given.get(method, {}) if isinstance(method, str) else {}
    given = tables_for_method(given, method, [method])
    shipped = shipped_defaults(_value_in(given, "data", "dataset", "digits"), method)
    tables = merge(shipped, given)
    if isinstance(tables.get("method"), Mapping):
        tables["method"] = {key: value for key, value in tables["method"].items() if key != "name"}
    declared = {section: cls for section, _, cls in setting_classes([method])}
    defaults = {section: {key.name: key.default for key in fields(cls)} for section, cls in declared.items()}
    base = merge(defaults, shipped)
    errors = _problems(tables, declared, method) + contradictions(merge(base, tables))
    if "method" not in declared:
        errors.append(f"method.name: got {method!r}{_method_remedy(str(method))}")
    if errors:
        raise ConfigError([restore_written_name(error, method, own_section) for error in errors])
    explicit = {
        f"{section}.{key}"
        for section, values in tables.items()
        for key, value in values.items()
        if not stored and value != base[section][key]
    }
    tables = merge(tables, {"data": default_constants(merge(base, tables)["data"])})
    sections = {section: _build(cls, tables.get(section, {})) for section, cls in declared.items()}
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


def restore_written_name(error: str, method: Any, own_section: Any) -> str:
    """An error message about `method.strength` with the name that the user wrote, `pfedlms.strength`, if the key is in
    the method's own section."""
    section, _, text = error.partition(".")
    key = text.partition(":")[0]
    is_own = section == "method" and key != "name" and isinstance(own_section, Mapping) and key in own_section
    return f"{method}.{text}" if is_own else error


def _problems(tables: Mapping[str, Any], declared: Mapping[str, type[Any]], method: Any) -> list[str]:
    """Everything wrong with `tables`; `declared` has the dataclass of each section for `method`."""
    errors = []
    names = [*SECTIONS, "method"]
    for section, values in tables.items():
        if section in METHODS:
            errors.append(f"[{section}]: settings of {section}, but the method is {method}; leave them out")
        elif section not in names:
            place = keyword_places([method]).get(section)
            if place and not isinstance(values, Mapping):
                errors.append(f"{section}: got a key without a section, expected it below [{place[0]}]")
            else:
                remedy = did_you_mean(section, [*names, *([method] if method in list(METHODS) else [])])
                errors.append(f"[{section}]: unknown section; {remedy}")
        elif not isinstance(values, Mapping):
            errors.append(f"{section}: got {values!r}, expected a section [{section}]")
        elif section in declared:
            foreign = {key: explain_foreign_key(key, method) for key in values} if section == "method" else {}
            errors += [f"method.{key}: {explanation}" for key, explanation in foreign.items() if explanation]
            rest = {key: value for key, value in values.items() if not foreign.get(key)}
            errors += find_problems(section, declared[section], rest, _suggest_place)
    return errors


def _method_remedy(text: str) -> str:
    """What to do about a text that names no method: several names, a name with settings, or an unknown name."""
    if "," in text and all(find_method(name) for name in text.split(",")):
        return f", expected one; several are compared: pfedlms compare --methods {text}; in Python pfedlms.compare"
    name, *assignments = text.split(":")
    if find_method(name) is None or not assignments:
        own = "a method of your own takes --import MODULE; in Python, import its module first"
        return f"; {did_you_mean(text, METHODS)}; {own}"
    places = keyword_places([name])
    parts = [assignment.partition("=") for assignment in assignments]
    pairs = [(places.get(key, ("method", key)), value or "…") for key, _, value in parts]
    options = " ".join(f"--set {section}.{key}={value}" for (section, key), value in pairs)
    keywords = ", ".join(f"{keyword(section, key)}={value}" for (section, key), value in pairs)
    return f", expected the name alone; its settings stand apart: --method {name} {options}; in Python {keywords}"


def _build(declared: type[Any], values: Mapping[str, Any]) -> Any:
    types = {key.name: type_name(key) for key in fields(declared)}
    return declared(**{key: float(value) if types[key] == "float" else value for key, value in values.items()})
