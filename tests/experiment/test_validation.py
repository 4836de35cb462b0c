"""`data.validation`: samples that no training sees, and V-acc wherever P-acc is reported; without it, nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import OPTIONS, accuracy_of, change, network, same_models
from small import SMALL as FOUR

import pfedlms
from factories import federation
from pfedlms.cli import main
from pfedlms.data import Partitioning, from_pool, load_dataset
from pfedlms.engine.training import LocalWorker
from pfedlms.methods import METHODS
from pfedlms.models import Cohort
from pfedlms.report.progress import accuracies

SMALL = {**FOUR, "rounds": 4, "clients": 5}


# --- what training sees ---


@pytest.mark.parametrize("method", METHODS)
def test_no_method_sees_what_is_set_aside(method: str) -> None:
    """Whatever stands there: models and messages are the same to the bit."""
    data = from_pool(*load_dataset("digits"), Partitioning(5, 0.5, 0, validation=0.3))
    aside = torch.from_numpy(np.concatenate(data.validation))
    other_x, other_y = data.x.clone(), data.y.clone()
    other_x[aside], other_y[aside] = 1e6, 9 - other_y[aside]
    runs = [federation(method, each) for each in (data, replace(data, x=other_x, y=other_y))]
    traffic = []
    for run in runs:
        run.start()
        traffic.append([run.play_round().traffic for _ in range(2)])
    assert traffic[0] == traffic[1]
    assert same_models(*([model for _, model in run.models()] for run in runs))
    ours, theirs = (run.evaluate() for run in runs)
    assert (ours.correct, ours.loss) == (theirs.correct, theirs.loss)
    assert ours.validation != theirs.validation


# --- what is reported ---


@pytest.mark.parametrize(("method", "participation"), [("pfedlms", 0.4), ("fedavg", 0.4), ("local", 1.0)])
def test_v_acc_is_that_of_the_models(method: str, participation: float) -> None:
    """Of the last round's participants and of everyone, by PyTorch from every client's model; P-acc beside it."""
    result = pfedlms.run(method=method, validation=0.25, participation=participation, **SMALL)
    data, models, last = result.federation.data, result.models, result.metrics[-1]
    took_part = last.get("clients", range(5))
    assert len(took_part) == round(5 * participation)
    assert last["v_acc"] == pytest.approx(accuracy_of(models, data, data.validation, took_part))
    assert last["p_acc"] == pytest.approx(accuracy_of(models, data, data.test, took_part))
    everyone = result.summary["everyone"]
    assert everyone["validation_accuracy"] == pytest.approx(accuracy_of(models, data, data.validation, range(5)))
    assert everyone["accuracy"] == pytest.approx(accuracy_of(models, data, data.test, range(5)))


def test_a_round_of_clients_without_any_has_no_v_acc() -> None:
    """One of three clients holds a single training sample; where it takes part alone there is nothing to measure."""
    x, y = load_dataset("digits")
    pairs = [((x[k : k + n], y[k : k + n]), (x[k + 60 : k + 80], y[k + 60 : k + 80])) for k, n in ((0, 60), (100, 1))]
    settings = {"method": "local", "validation": 0.25, "participation": 0.5, "rounds": 8, "local_steps": 2}
    with pytest.warns(UserWarning, match="data.validation: 1 of 2 clients"):
        result = pfedlms.run(pairs, network, **settings)
    taken = {record["clients"][0]: record["v_acc"] for record in result.metrics}
    assert taken.keys() == {0, 1}
    assert all((record["v_acc"] is None) == (record["clients"] == [1]) for record in result.metrics)
    assert all(("V-acc" in accuracies(record)) == (record["v_acc"] is not None) for record in result.metrics)
    measured = [record["v_acc"] for record in result.metrics if record["v_acc"] is not None]
    assert result.summary["validation_accuracy"]["last10"] == pytest.approx(np.mean(measured))
    expected = accuracy_of(result.models, result.federation.data, result.federation.data.validation, [0])
    assert result.summary["everyone"]["validation_accuracy"] == pytest.approx(expected)


# --- without it ---


def test_without_it_nothing_is_said_and_nothing_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One evaluation a round and cohort, of the test split."""
    evaluated, evaluate = [], LocalWorker.evaluate

    def counted(self: LocalWorker, cohort: Cohort, params: torch.Tensor, held: Any) -> Any:
        evaluated.append(held)
        return evaluate(self, cohort, params, held)

    monkeypatch.setattr(LocalWorker, "evaluate", counted)
    out = tmp_path / "run"
    assert main(["run", "--method", "local", *OPTIONS, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    files = "".join((out / name).read_text() for name in ("metrics.jsonl", "summary.json"))
    assert not re.search("v_acc|v-acc|validation", (shown.out + shown.err + files).lower())
    change(out, "rounds = 3", "rounds = 4")
    result = pfedlms.resume(out)
    assert result.validation_accuracy is None
    assert result.federation.data.validation == ()
    assert len(evaluated) == 4  # once a round
    assert all(len(held[0]) == len(result.federation.data.test[0]) for held in evaluated)
