"""What a newcomer gets wrong first, and that one line says what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from small import QUICK as SHORT
from torch import Tensor, nn

import pfedlms
from pfedlms.errors import ConfigError, DataError, UsageError
from pfedlms.experiment.config import load_config, parse_overrides
from pfedlms.experiment.grids import plan

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
QUICK: dict[str, Any] = {**SHORT, "method": "local", "rounds": 1}
FEW: dict[str, Any] = {**QUICK, "clients": 2}


def linear() -> nn.Module:
    return nn.Linear(6, 3)


class Mistyped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leyar(x)  # type: ignore[no-any-return, operator]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(dim=1))  # type: ignore[no-any-return]


def broken() -> nn.Module:
    raise KeyError("width")


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


MODELS: dict[str, tuple[Any, str]] = {
    "class": (nn.Linear, r"cannot be built \(.*'in_features'.*\); .*model=lambda: Linear\(…\)"),
    "factory that fails": (broken, r"model: cannot be built \(KeyError: 'width'\)$"),
    "mistyped attribute": (Mistyped, r"fails on samples of shape \(6,\) \(AttributeError: .* 'leyar'"),
    "number": (3, "model: got 3, expected the name of a model, an nn.Module, or a function"),
    "embedding": (Words, r"it takes whole numbers, such as token ids: .* x\.astype\(np\.int64\)"),
}


@pytest.mark.parametrize(("model", "message"), MODELS.values(), ids=list(MODELS))
def test_a_model_that_cannot_be_used(model: Any, message: str) -> None:
    x = abs(X).round() if model is Words else X
    with pytest.raises(UsageError, match=message):
        pfedlms.run((x, Y), model, **FEW)


def test_class_numbers_with_gaps() -> None:
    """Three outputs do for 0, 5 and 10 once they are numbered as the message says."""
    with pytest.raises(UsageError, match=r"at least 11.* only 3 occur \(0, 5, 10\).*np\.unique") as caught:
        pfedlms.run((X, 5 * Y), linear, **FEW)
    assert "y = np.unique(y, return_inverse=True)[1]" in str(caught.value)
    numbered = np.unique(5 * Y, return_inverse=True)[1]
    assert pfedlms.run((X, numbered), linear, **FEW).classes == ("0", "1", "2")
    with pytest.raises(UsageError, match=r"one number per class$"):  # two outputs do not do for three classes
        pfedlms.run((X, 5 * Y), lambda: nn.Linear(6, 2), **FEW)


def test_a_metric_needs_no_gradient_but_torch() -> None:
    assert pfedlms.run((X, Y), linear, metric=lambda o, t: (o.argmax(1) == t).float(), **FEW).accuracy >= 0
    with pytest.raises(UsageError, match=r"^metric: got ndarray, expected a tensor.*nothing but torch$"):
        pfedlms.run((X, Y), linear, metric=lambda o, t: o.numpy()[:, 0], **FEW)
    for given in (("name", 3), 3):
        with pytest.raises(UsageError, match=r"metric: got 3, expected a function .*, or a pair \(name, function\)"):
            pfedlms.run((X, Y), linear, metric=given, **FEW)  # type: ignore[arg-type]


def test_whole_numbers_for_a_loss_that_takes_floats() -> None:
    several = RANDOM.integers(0, 2, (60, 3))
    with pytest.raises(UsageError, match=r"it takes targets that are floats: .*y\.astype\(np\.float32\)"):
        pfedlms.run((X, several), linear, loss=binary, **FEW)
    pfedlms.run((X, several.astype(np.float32)), linear, loss=binary, **FEW)
    pfedlms.run((X, several), linear, loss=lambda o, t: binary(o, t.float()), **FEW)
    with pytest.raises(UsageError) as caught:  # floats would not help
        pfedlms.run((X, Y), linear, loss=lambda o, t: o.nowhere, **FEW)
    assert "floats" not in str(caught.value)


DATA: dict[str, tuple[Any, str]] = {
    "four arrays": ((X, Y, X, Y), r"^data: got a tuple of 4 arrays, .*\(\(x_train, y_train\), \(x_test, y_test\)\)"),
    "a client of three": ([(X, Y, Y)], r"^client 0: got a tuple of 3 arrays, expected samples and labels"),
    "pairs": (list(zip(X, Y, strict=True)), r"^data: got a list of 60 samples, each with its label; .*row\[0\] for"),
    "triples": ([(x, y, 1.0) for x, y in zip(X, Y, strict=True)], r"each with its label, and 1 more per sample"),
}


@pytest.mark.parametrize(("data", "message"), DATA.values(), ids=list(DATA))
def test_data_in_another_order(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pfedlms.run(data, linear, **QUICK)


def test_a_path_without_its_kind(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    for path, kind in (("d.csv", "file"), ("~/d.NPZ", "file"), (str(tmp_path / "pets"), "folder"), ("a/b", "folder")):
        for ask in (lambda path=path: pfedlms.run(path, **QUICK), lambda path=path: pfedlms.load_dataset(path)):
            with pytest.raises(UsageError) as caught:
                ask()  # type: ignore[no-untyped-call]
            assert str(caught.value).endswith(f"did you mean {kind}:{path}?")


def test_numbers_to_be_predicted_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,label\n" + "".join(f"{row},{row / 7}\n" for row in range(30)))
    with pytest.raises(DataError, match=r"need a loss, which is given in Python: pfedlms\.run\("):
        pfedlms.run(f"file:{file}", **QUICK)


@pytest.mark.parametrize("seeds", [[1, 1], [], [-1], 1.5, 0, True, "2", None])
def test_a_number_of_seeds_that_is_none(seeds: Any) -> None:
    for ask in (lambda: pfedlms.compare(seeds=seeds), lambda: pfedlms.sweep(seeds=seeds, learning_rate=[0.1, 0.2])):
        with pytest.raises(ConfigError) as caught:
            ask()
        expected = "a count of at least 1, or a list of different seeds, [1, 2, 3]"
        assert caught.value.problems == (f"seeds: got {seeds!r}, expected {expected}",)


@pytest.mark.parametrize("ask", [load_config, lambda file, given: plan(file, given, "pfedlms,local")])
def test_a_mistyped_setting_of_a_method_is_named_as_it_was_written(ask: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(None, parse_overrides(["pfedlms.strenght=0.1"]))
    assert caught.value.problems == ("pfedlms.strenght: unknown key; did you mean strength?",)
