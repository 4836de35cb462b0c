"""Settings: which source of a value wins, what is refused with which message, and that a written file reads back."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pfedlms
from pfedlms.errors import ConfigError
from pfedlms.experiment.config import (
    RELATIVES,
    SCHEMA,
    SECTIONS,
    Config,
    from_texts,
    load_config,
    shipped_defaults,
)
from pfedlms.experiment.rules import ineffective_settings
from pfedlms.methods import METHODS
from pfedlms.settings import type_name

SHIPPED = sorted(
    file.name for file in (resources.files("pfedlms") / "configs").iterdir() if file.name.endswith(".toml")
)


def write(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(file: Path | None = None, **tables: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, tables)
    return list(caught.value.problems)


def test_defaults_then_preset_then_file_then_overrides(tmp_path: Path) -> None:
    """digits.toml ships hidden = 252 and batch_size = 32 the defaults in the code are 256 and 64."""
    default, shipped = Config().model.hidden, load_config().model.hidden
    assert (default, shipped) == (256, 252)
    file = write(tmp_path, "[model]\nhidden = 100\n[train]\nrounds = 7\n")
    assert load_config(file).model.hidden == 100
    config = load_config(file, {"model": {"hidden": 50}})
    assert config.model.hidden == 50  # the override
    assert config.train.rounds == 7  # the file
    assert config.train.batch_size == 32  # the preset
    assert config.data.clients == 20  # the default
    assert load_config(write(tmp_path, '[data]\ndataset = "mnist"\n')).train.rounds == 200
    assert load_config(None, {"data": {"dataset": "custom"}}).model.hidden == 256  # none: the defaults


def test_a_data_set_may_take_the_settings_of_its_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    """For sketchvote, gain 3 and allocation 0.7 were chosen on CIFAR-10. A relative gives nothing else, and it gives
    nothing to a data set that has a file of its own."""
    for dataset, model, augment in (("svhn", "vgg8", "crop"), ("cifar100", "vgg11", "crop+flip")):
        tables = shipped_defaults(dataset, "sketchvote")
        assert tables["method"] == {"gain": 3.0, "allocation": 0.7}
        assert (tables["model"]["name"], tables["train"]["augment"]) == (model, augment)
    own = shipped_defaults("mnist", "zsign")
    monkeypatch.setitem(RELATIVES, "mnist", "cifar10")
    assert shipped_defaults("mnist", "zsign") == own


def test_an_override_has_the_type_of_its_key() -> None:
    texts = ["rounds=5", "train.learning_rate=1e-2", "method.layerwise=False", "data.dir=a=b c", "method.ratio=1"]
    tables = from_texts(list(METHODS), texts)
    assert tables == {
        "train": {"rounds": 5, "learning_rate": 0.01},
        "method": {"layerwise": False, "ratio": 1.0},
        "data": {"dir": "a=b c"},
    }
    assert isinstance(tables["method"]["ratio"], float)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.rounds=5, 7", [5, 7]),
        ("train.learning_rate=.1,x", [0.1, "x"]),
        ("train.optimizer=sgd,adamw", ["sgd", "adamw"]),
        ("data.dataset=file:a.npz,file:b.npz", ["file:a.npz", "file:b.npz"]),
        ("data.dataset=file:a,b.npz", "file:a,b.npz"),
        ("data.class_names=a,b", "a,b"),
    ],
)
def test_values_with_commas_are_a_list_unless_they_are_one_text(text: str, value: Any) -> None:
    ((found,),) = (table.values() for table in from_texts(["local"], [text]).values())
    assert found == value


def test_a_key_that_methods_share_has_one_type() -> None:
    """An override gets its type before the method is known, because a file may name the method."""
    kinds: dict[str, set[str]] = {}
    for method in METHODS.values():
        for declared in fields(method.Settings):
            kinds.setdefault(declared.name, set()).add(type_name(declared))
    assert all(len(kind) == 1 for kind in kinds.values()), kinds
    tables = from_texts(list(METHODS), ["method.bits=2", "method.name=eden"])
    assert tables == {"method": {"bits": 2, "name": "eden"}}
    assert load_config(None, tables).settings.bits == 2


def test_numbers_of_numpy_and_torch_are_accepted() -> None:
    numbers = (np.int64(2), torch.tensor(0.0625)), (2, 0.0625)
    from_arrays, plain = (load_config(None, {"train": {"rounds": n, "learning_rate": rate}}) for n, rate in numbers)
    assert (from_arrays, from_arrays.to_toml()) == (plain, plain.to_toml())
    assert load_config(None, {"method": {"layerwise": np.bool_(0)}}).settings.layerwise is False
    for wrong in (np.float64(2.5), np.array([3])):
        (found,) = problems(train={"rounds": wrong})
        assert found.startswith("train.rounds: got ")


def test_a_removed_setting_is_unknown_but_a_stored_run_that_did_not_use_it_loads(tmp_path: Path) -> None:
    file = write(tmp_path, "schema = 1\n[run]\nseed = 3\nfast = false\n")
    assert load_config(file, stored=True).run.seed == 3
    (found,) = problems(file)
    assert found.startswith("run.fast: unknown key")
    file = write(tmp_path, "[run]\nfast = true\n")
    with pytest.raises(ConfigError, match=r"run\.fast: unknown key"):
        load_config(file, stored=True)


def test_all_errors_are_reported_at_once_with_the_nearest_names() -> None:
    found = problems(
        data={"clinets": 5, "dataset": "digts"},
        model={"name": "vgg9"},
        train={"rounds": 2.5},
        method={"stength": 1.0},
        trian={"rounds": 3},
    )
    expected = [
        ("data.clinets: unknown key; did you mean clients?", ""),
        ("data.dataset: got 'digts', expected one of: digits, ", ", folder:PATH, file:PATH"),
        ("model.name: got 'vgg9', expected one of: dnn, vgg8, ", ""),
        ("train.rounds: got 2.5, expected a whole number of at least 1", ""),
        ("method.stength: unknown key; did you mean strength?", ""),
        ("[trian]: unknown section; did you mean train", ""),
    ]
    assert len(found) == len(expected)
    for start, end in expected:
        assert any(line.startswith(start) and line.endswith(end) for line in found), start


def test_an_unknown_method_is_answered_with_the_nearest_names() -> None:
    (found,) = problems(method={"name": "pfedlsm"})
    assert found.startswith("method.name: got 'pfedlsm'; did you mean pfedlms")
    (found,) = problems(method={"name": 5})
    assert found.startswith(f"method.name: got 5; expected one of: {', '.join(METHODS)}; one of your own takes")


def test_a_key_of_another_method_is_refused() -> None:
    (found,) = problems(method={"name": "fedavg", "thresholds": 3})
    assert found == f"method.thresholds: unknown key; expected one of: {', '.join(vars(METHODS['fedavg'].Settings()))}"
    (found,) = problems(method={"name": "local", "thresholds": 3})
    assert found == "method.thresholds: unknown key; this section has no keys at all"


def test_sections_of_other_methods_are_for_runs_of_these() -> None:
    given = {"pfedlms": {"strength": 0.3}, "fedavg": {"server_step": 0.5}}
    assert load_config(None, given).settings.strength == 0.3
    assert load_config(None, {**given, "method": {"name": "fedavg"}}).settings.server_step == 0.5


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("data", "alpha", [0, -1e-9, float("nan"), float("inf"), "0.5", True, None, [0.5]]),
        ("data", "clients", [0, 1.0, 1 << 32]),
        ("method", "thresholds", [0, 1.0, 256, True, "7"]),
        ("method", "layerwise", [0, 1, "true", None]),
        ("train", "learning_rate", [0, -0.1, 10**400, "fast"]),
        ("train", "momentum", [-0.1, 1.0]),
        ("run", "seed", [-1, 1 << 63, 0.0, "x"]),
        ("run", "device", ["gpu", 0, ""]),
        ("run", "out", [5, None, False]),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_bounds_is_refused(section: str, key: str, values: list[Any]) -> None:
    for value in values:
        (found,) = problems(**{section: {key: value}})
        assert found.startswith(f"{section}.{key}: got {value!r}, expected "), found


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("data", "alpha", [1e-9, 100]),
        ("method", "thresholds", [1, 255]),
        ("method", "ratio", [1e-6, 1, 1.0]),
        ("run", "seed", [0, (1 << 63) - 1]),
    ],
)
def test_the_bounds_themselves_are_allowed(section: str, key: str, values: list[Any]) -> None:
    for value in values:
        assert load_config(None, {section: {key: value}}).tables()[section][key] == value


BROKEN = {
    "bracket": "[train\nrounds = 1",
    "too many digits": "[run]\nseed = " + "9" * 5000,
    "too deep": "a = " + "[" * 5000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_toml_is_refused_with_the_name_of_the_file(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    (found,) = problems(file)
    assert found.startswith(f"{file}: not a TOML file: ")


@pytest.mark.parametrize("schema", [2, "1"])
def test_another_schema_is_refused_before_anything_else(schema: Any) -> None:
    (found,) = problems(schema=schema, train={"rounds": -1})
    assert found == f"schema: got {schema!r}, expected 1; the settings are of another version"


@settings(deadline=None)
@given(st.text(), st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.integers(0, (1 << 63) - 1))
def test_a_written_configuration_reads_back_with_any_values(text: str, number: float, seed: int) -> None:
    config = load_config(None, {"run": {"out": text, "seed": seed}, "train": {"learning_rate": number}})
    read = tomllib.loads(config.to_toml())
    assert (read["run"]["out"], read["run"]["seed"], read["train"]["learning_rate"]) == (text, seed, number)
    assert load_config(None, read) == config


@pytest.mark.parametrize("name", METHODS)
def test_a_written_file_has_every_key(name: str) -> None:
    """Later changes of a default must not change a stored run."""
    written = tomllib.loads(load_config(None, {"method": {"name": name}}).to_toml())
    assert written.pop("schema") == SCHEMA
    for section, cls in SECTIONS.items():
        assert written.pop(section).keys() == cls.__dataclass_fields__.keys()
    assert written.pop("method").keys() == {"name", *METHODS[name].Settings.__dataclass_fields__}
    assert not written


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_load_and_begin_with_the_command_that_runs_them(name: str) -> None:
    text = (resources.files("pfedlms") / "configs" / name).read_text(encoding="utf-8")
    assert text.startswith("# pfedlms run")
    dataset, _, method = name.removesuffix(".toml").partition("-")
    method = method or next(each for each in METHODS if f"{dataset}-{each}.toml" not in SHIPPED)
    assert f"--dataset {dataset}" in text.splitlines()[0]
    tables = tomllib.loads(text)
    assert tables.pop("schema") == SCHEMA
    named: dict[str, Any] = {"data": {"dataset": dataset}, "method": {"name": method}}
    config = load_config(None, named)
    for section, values in tables.items():
        for key, value in values.items():
            assert config.tables()[section][key] == value
    assert shipped_defaults(dataset, method).keys() >= tables.keys()
    other = load_config(None, {**named, "train": {"optimizer": "adamw", "learning_rate": 0.001}})
    assert other.given <= {
        "data.dataset",
        "train.optimizer",
        "train.learning_rate",
    }  # a shipped value counts as not given
    assert not list(ineffective_settings(other))


@pytest.mark.parametrize("text", ['method = "fedavg"', "[[train]]\nrounds = 2", "rounds = 3"])
def test_a_value_outside_of_a_section_is_refused(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    calls: list[Any] = [
        partial(load_config, file),
        partial(pfedlms.run, config=file),
        partial(pfedlms.study, cells={"a": {"seed": 2}}, config=file),
        partial(pfedlms.sweep, momentum=[0.1, 0.2], config=file),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"my\.toml: (method|train|rounds): got a value, expected a section"):
            call()


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "\ufeff[train]\nrounds = 7\n")).train.rounds == 7
