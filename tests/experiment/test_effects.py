"""Settings that have no effect beside others: said once, of what was given, and of nothing else."""

from __future__ import annotations

import warnings
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small import QUICK as SHORT
from small import X, Y, change, linear

import pfedlms
from pfedlms.errors import DataError
from pfedlms.experiment.config import load_config
from pfedlms.experiment.rules import without_effect

QUICK: dict[str, Any] = {**SHORT, "method": "local", "rounds": 1}
HELD = [(X[:40], Y[:40]), (X[40:], Y[40:])]


def said(data: Any, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pfedlms.run(data, linear, **QUICK, **settings)
    return [str(each.message) for each in told]


SAID: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "momentum": ((X, Y), {"optimizer": "adamw", "momentum": 0.9, "learning_rate": 0.001}, "train.momentum: 0.9 has no"),
    "decay": ((X, Y), {"decay": 0.5}, "train.decay: 0.5 has no effect with train.schedule = constant; set"),
    "decay_every": ((X, Y), {"decay_every": 7, "schedule": "cosine"}, "train.decay_every: 7 has no effect with"),
    "alpha, iid": ((X, Y), {"alpha": 0.1, "partition": "iid"}, "data.alpha: 0.1 has no effect, data.partition = iid"),
    "alpha, held": (HELD, {"alpha": 0.1}, "data.alpha: 0.1 has no effect, as the data say whose each sample is"),
    "classes": ((X, Y), {"classes_per_client": 1}, "data.classes_per_client: 1 has no effect, data.partition = diri"),
    "rate of sgd": ((X, Y), {"optimizer": "adamw"}, "train.learning_rate: 0.1 is for sgd; adamw wants 0.001 or so"),
    "momentum of sgd": ((X, Y), {"momentum": 0.9, "alpha": 0.9}, None),
    "step": ((X, Y), {"schedule": "step", "decay": 0.5, "decay_every": 2}, None),
    "quantity": ((X, Y), {"alpha": 0.9, "partition": "quantity"}, None),
    "classes of classes": ((X, Y), {"classes_per_client": 1, "partition": "classes"}, None),
}


@pytest.mark.parametrize(("data", "settings", "text"), SAID.values(), ids=list(SAID))
def test_what_has_no_effect_is_said_once_and_all_else_is_not(data: Any, settings: Any, text: str | None) -> None:
    told = said(data, **settings, **({} if data is HELD else {"clients": 2}))
    assert len(told) == (text is not None)
    assert all(each.startswith(str(text)) for each in told)


def test_neither_defaults_nor_shipped_files_are_anybodys_wish() -> None:
    names = [file.name[:-5] for file in (resources.files("pfedlms") / "configs").iterdir()]
    assert len(names) > 10
    for name in names:
        dataset, _, method = name.partition("-")
        tables: dict[str, Any] = {"data": {"dataset": dataset}, "method": {"name": method or "pfedlms"}}
        config = load_config(None, {**tables, "train": {"optimizer": "adamw", "learning_rate": 0.001}})
        assert config.given <= {"data.dataset", "train.optimizer", "train.learning_rate"}
        assert not list(without_effect(config))


def test_a_run_that_is_gone_on_with_is_not_asked_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"train\.decay: 0\.5 has no effect"):
        pfedlms.run((X, Y), linear, decay=0.5, clients=2, out=tmp_path / "r", **QUICK)
    done = pfedlms.load(tmp_path / "r")
    assert pfedlms.resume(tmp_path / "r").summary == done.summary  # nothing is left to play, so no data are needed
    change(tmp_path / "r", "rounds = 1", "rounds = 2")
    pfedlms.resume(tmp_path / "r", (X, Y), linear)  # warnings are errors here
    assert load_config(tmp_path / "r" / "config.toml").given >= {"train.decay"}  # but one who starts from the file is


def test_a_study_says_it_once_for_all_its_runs() -> None:
    settings = {**SHORT, "rounds": 1, "clients": 2, "partition": "iid", "alpha": 0.3, "learning_rate": 0.05}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pfedlms.compare((X, Y), linear, methods="local,fedavg:optimizer=adamw:momentum=0.9", seeds=2, **settings)
    texts = [str(each.message) for each in told]
    assert sorted(text.partition(":")[0] for text in texts) == ["data.alpha", "train.momentum"]


def test_a_column_of_clients_and_another_number_of_them(tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, x=X, y=Y, client=np.arange(80) // 20)
    with pytest.raises(
        DataError, match=r"data\.clients: got 7, but the data say whose each sample is and name 4 clients"
    ):
        pfedlms.run(f"file:{file}", clients=7, **QUICK)
    for settings, clients in (({}, 4), ({"clients": 4}, 4), ({"clients": 3, "partition": "iid"}, 3)):
        assert pfedlms.run(f"file:{file}", **settings, **QUICK).summary["clients"] == clients


@pytest.mark.filterwarnings("ignore:chosen by p_acc")
def test_a_study_looks_at_all_its_data_before_it_trains(tmp_path: Path) -> None:
    """The second value asks for more clients than there are samples for."""
    trained: list[str] = []
    watching = SimpleNamespace(on_round=lambda run, record: trained.append(run.name))
    for data, model in (((X, Y), linear), ("digits", None)):
        settings = {**QUICK, "clients": [2, 2000], "callbacks": [watching], "out": tmp_path / "s"}
        with pytest.raises(DataError, match=r"data\.clients: got 2000"):
            pfedlms.sweep(data, model, **settings)
    assert not trained
    assert not (tmp_path / "s").exists()
