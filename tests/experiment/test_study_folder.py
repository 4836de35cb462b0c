"""Which runs may be added to the folder of a study: those of the same problem, with one configuration per row."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from small import SMALL, X, Y, edit_config, half_accuracy, linear, without_timings
from torch import Tensor, nn

import pfedlms
from pfedlms.errors import RunDirectoryError
from pfedlms.experiment.digests import digest, is_own
from pfedlms.methods import METHODS


def test_runs_of_another_problem_are_not_added_to_a_study(tmp_path: Path) -> None:
    """Neither as new rows nor as new seeds; a refused call does not change the folder."""

    def study(data: Any, model: Any = linear, seeds: Any = (0,), **more: Any) -> pfedlms.Study:
        problem = pfedlms.Problem(data, model, more.pop("loss", None), more.pop("metric", None))
        return pfedlms.compare(problem, seeds=list(seeds), out=tmp_path / "s", **{**SMALL, **more})

    first, plan = study((X, Y), methods="fedavg"), tmp_path / "s" / "study.json"
    before = plan.read_text()
    with pytest.raises(RunDirectoryError, match=r"holds a comparison, and this is a sweep"):
        pfedlms.sweep((X, Y), linear, momentum=[0.1, 0.2], seeds=1, out=tmp_path / "s", **SMALL)
    other = r"fedavg-seed0: was trained on other data than given now; give the same as before, or name another out="
    for more in ({"methods": "fedavg,ditto"}, {"methods": "local"}, {"methods": "fedavg", "seeds": [1]}):
        with pytest.raises(RunDirectoryError, match=other):
            study((X, np.roll(Y, 1)), **more)
    with pytest.raises(RunDirectoryError, match=r"was trained with another model than given now"):
        study((X, Y), lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), methods="local")
    for key, more in (
        ("train.metric", {"metric": half_accuracy}),
        ("data.clients", {"clients": 5}),
        ("data.dataset, ", {"data": "digits", "model": None}),
    ):
        with pytest.raises(RunDirectoryError, match=f"holds runs with another {key}"):
            study(**{"data": (X, Y), "methods": "local", **more})
    assert plan.read_text() == before
    assert without_timings(study((X, Y), methods="fedavg,local").runs[0].metrics) == without_timings(
        first.runs[0].metrics
    )
    study((X, Y), methods="local", seeds=[1])
    shutil.rmtree(tmp_path / "s" / "local-seed1")
    with pytest.raises(RunDirectoryError, match="was trained on other data than given now"):
        pfedlms.resume(tmp_path / "s", (X, np.roll(Y, 1)), linear)


def test_runs_on_changed_files_are_not_added_to_a_study(tmp_path: Path) -> None:
    """One call may vary the data on purpose, and may be repeated."""

    def compare(file: str, methods: str) -> pfedlms.Study:
        return pfedlms.compare(f"file:{tmp_path / file}", methods=methods, seeds=1, out=tmp_path / "s", **SMALL)

    for name, rows in (("a", slice(None)), ("b", slice(60)), ("copy", slice(None))):
        np.savez(tmp_path / f"{name}.npz", x=X[rows], y=Y[rows])
    compare("a.npz", "fedavg")
    compare("copy.npz", "local")
    np.savez(tmp_path / "a.npz", x=X[::-1], y=Y)
    for name in ("a.npz", "b.npz"):
        with pytest.raises(RunDirectoryError, match="was trained on other data than given now"):
            compare(name, "ditto")
    varied: dict[str, Any] = {"grid": {"alpha": [0.3, 3.0]}, "method": "local", "validation": 0.2, **SMALL}
    varied["out"] = tmp_path / "v"
    data = (10 * X).astype(int), Y  # which become floats
    for _ in range(2):
        assert len(pfedlms.study(data, linear, **varied).runs) == 2
    assert len(pfedlms.study(data, linear, **{**varied, "grid": {"alpha": [1.0]}}).runs) == 1


def relu() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def weighted(weight: float) -> Any:
    return lambda outputs, targets: weight * nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_another_model_or_loss_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    def study(model: Any = relu, weight: float = 1.0) -> pfedlms.Study:
        loss = weighted(weight)
        return pfedlms.compare((X, Y), model, loss=loss, methods="fedavg", seeds=1, out=tmp_path / "s", **SMALL)

    first = study()
    assert first.runs[0].summary["digests"].keys() == {"model", "loss"}
    assert without_timings(study(lambda: relu()).summaries) == without_timings(first.summaries)
    for other, name in (({"model": tanh}, "model"), ({"weight": 5.0}, "loss")):
        with pytest.raises(RunDirectoryError, match=f"was trained with another {name} than given now"):
            study(**other)
    folder = tmp_path / "s" / "fedavg-seed0"
    for data in (None, (X, Y)):
        with pytest.raises(RunDirectoryError, match="was trained with another model than given now"):
            pfedlms.load(folder, data, tanh).model(0)
        assert "ReLU" in repr(pfedlms.load(folder, data, relu).model(0))
    edit_config(folder, "rounds = 3", "rounds = 4")
    with pytest.raises(RunDirectoryError, match="was trained with another loss than given now"):
        pfedlms.resume(folder, (X, Y), relu, loss=weighted(5.0))
    assert pfedlms.resume(folder, (X, Y), relu, loss=weighted(1.0)).summary["rounds"] == 4


METHOD = """
from dataclasses import dataclass
from pfedlms.methods import Objective, PerClient, register
from pfedlms.methods.local import Local
from pfedlms.settings import setting

STRENGTH = 0.1

def pull(params, anchor):
    return STRENGTH * (params - anchor)  # a comment

@dataclass(frozen=True)
class Pull(Objective):
    anchor: PerClient

    def gradient(self, params):
        return pull(params, self.anchor.value)

class Base(Local):
    def objective(self, cohort, round):
        return Pull(PerClient(cohort.params))

@register
class Own(Base):
    name, paper, personal = "own", "a test", True

    @dataclass(frozen=True)
    class Settings:
        first: float = setting(1.0, "a test", minimum=0)
"""


def own_method(old: str = "", new: str = "") -> Any:
    """The class of a method of the user's own, of which some text is changed."""
    METHODS.pop("own", None)
    module: dict[str, Any] = {"__name__": "my_methods"}
    with patch.dict(sys.modules, my_methods=type(sys)("my_methods")):
        exec(METHOD.replace(old, new), module)
    return module["Own"]


def test_results_of_a_method_with_other_code_are_not_taken(tmp_path: Path) -> None:
    def study(seeds: int = 1) -> pfedlms.Study:
        return pfedlms.compare((X, Y), linear, methods="own,local", seeds=seeds, out=tmp_path / "s", **SMALL)

    try:
        own_method()
        first = study()
        assert [run.summary["digests"].keys() for run in first.runs] == [{"model", "method"}, {"model"}]
        own_method("# a comment", "# another one")
        assert without_timings(study().summaries) == without_timings(first.summaries)
        own_method("STRENGTH = 0.1", "STRENGTH = 0.2")
        other = "was trained with another code of its method than given now; give the same"
        for seeds in (1, 2):
            with pytest.raises(RunDirectoryError, match=f"own-seed0: {other}"):
                study(seeds)
        folder = tmp_path / "s" / "own-seed0"
        assert pfedlms.load(folder, (X, Y), linear).model(0)  # models need no code of the method
        edit_config(folder, "rounds = 3", "rounds = 4")
        with pytest.raises(RunDirectoryError, match=other):
            pfedlms.resume(folder, (X, Y), linear)
    finally:
        METHODS.pop("own", None)


def test_a_class_has_a_digest_of_its_code_and_what_it_uses() -> None:
    try:
        same = digest(own_method())
        for old, new in (
            ("# a comment", "# another one"),
            ("# a comment", "\nparams = 5"),  # an attribute has this name, too
            ("return STRENGTH", "'A docstring.'; return STRENGTH"),
        ):
            assert digest(own_method(old, new)) == same == digest(own_method())
        changes = {
            "STRENGTH = 0.1": "STRENGTH = 0.2", "params - anchor": "params + anchor",
            "return pull(": "return -pull(", "PerClient(cohort.params)": "PerClient(0 * cohort.params)",
            "setting(1.0": "setting(2.0", "    anchor: PerClient": "    anchor: PerClient\n    scale: float = 1.0",
        }  # fmt: skip
        digests = {digest(own_method(old, new)) for old, new in changes.items()}
        assert len(digests | {same}) == len(changes) + 1
    finally:
        METHODS.pop("own", None)
    assert not any(map(is_own, METHODS.values()))


def test_functions_and_modules_have_digests_of_their_code_and_values() -> None:
    """Also floats that NumPy lacks, variables without a value, and objects that hold each other."""

    def before_it_is_assigned(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - later

    torch.manual_seed(0)
    smooth = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.5)
    different = [
        lambda o, t: (o - t) ** 2, lambda o, t: 5 * (o - t) ** 2, scaled(1.0), scaled(2.0), Scaled(1.0), Scaled(2.0),
        Scaled(1.0).__call__, partial(half_accuracy), half_accuracy, wraps(half_accuracy)(scaled(1.0)), torch.sub,
        weighted(torch.ones(3)), weighted(torch.arange(6.0).reshape(3, 2)[:, 0]),
        nn.CrossEntropyLoss(reduction="none"), smooth,
        Activation(torch.relu), Activation(torch.tanh), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(),
        ("a", torch.sub), ("b", torch.sub), holding_itself(), before_it_is_assigned,
    ]  # fmt: skip
    digests = {digest(each) for each in different}
    later = 2.0
    assert len(digests | {digest(before_it_is_assigned)}) == len(different) + 1
    assert digest(nn.Linear(2, 2), weights=False) == digest(nn.Linear(2, 2), weights=False)
    assert digest(scaled(1.0)) == digest(scaled(1.0))
    text = "digest(lambda outputs, targets: {'a', 'b', 'c'} and 3 * (outputs - targets) ** 2)"
    script = f"from pfedlms.experiment.digests import digest; print({text})"
    outputs = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout for _ in range(2)}
    assert outputs == {f"{eval(text)}\n"}  # in other processes, and without a file to read


class Activation(nn.Module):
    """Its activation is no layer."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


def holding_itself() -> nn.Module:
    layers = [nn.Linear(2, 2) for _ in range(40)]
    for layer in layers:
        layer.others = [layers]  # type: ignore[assignment]
    return nn.Sequential(*layers)


def scaled(factor: float) -> Callable[..., Tensor]:
    def loss(outputs: Tensor, targets: Tensor, *, factor: float = factor) -> Tensor:
        return factor * (outputs - targets)

    return loss


@dataclass
class Scaled:
    """A loss that is an object."""

    factor: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * (outputs - targets)


def test_a_row_has_one_configuration(tmp_path: Path) -> None:
    common = {**SMALL, "methods": ["fedavg"], "out": tmp_path}
    pfedlms.compare((X, Y), linear, seeds=[1], **common)
    with pytest.raises(RunDirectoryError, match=r"fedavg-seed1 with another train\.learning_rate"):
        pfedlms.compare((X, Y), linear, seeds=[2], learning_rate=0.3, **common)
    assert len(pfedlms.compare((X, Y), linear, seeds=[2], **common).runs) == 1
    assert [run.summary["seed"] for run in pfedlms.load(tmp_path).runs] == [1, 2]
