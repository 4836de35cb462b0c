"""One round: its loss, divergence, and clients with very little data. Its bytes: methods/test_battery.py."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from torch import nn

import factories
from factories import played, small_data, small_module
from pfedlms.errors import DivergedError
from pfedlms.methods import METHODS

federation = partial(factories.federation, module=small_module(), local_steps=2, batch_size=8)


def test_the_loss_of_a_round_is_weighted_by_samples() -> None:
    """Steps are too small to move a model, and use every sample equally often: the mean over all samples."""
    data, model = small_data(8, 32), small_module()
    data.x[data.train[1]] *= 5  # so that the two clients' losses differ
    got = federation("local", data, local_steps=4, learning_rate=1e-30, weight_decay=0.0).play_round().loss
    seen = np.concatenate(data.train)
    expected = nn.functional.cross_entropy(model.double()(data.x[seen].double()), data.y[seen]).item()
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
def test_divergence_is_reported_with_round_and_client(cohort_size: int) -> None:
    """Only client 2 has infinite samples."""
    data = small_data(20, 20, 20, 20)
    data.x[data.train[2]] = np.inf
    with pytest.raises(DivergedError, match=r"before round 1.* client 2 .*train\.learning_rate"):
        federation("local", data, cohort_size=cohort_size).start()


@pytest.mark.parametrize("counts", [(30, 1, 3), (20,)], ids=["three clients", "one client"])
@pytest.mark.parametrize("name", METHODS)
def test_clients_with_one_class_or_few_samples_take_part(name: str, counts: tuple[int, ...]) -> None:
    """The first client has a single class, others have one and three samples; a batch has eight."""
    data = small_data(*counts)
    for own in (data.train[0], data.test[0]):
        data.y[own] = 1
    run = played(federation(name, data, local_steps=5), 2)
    report, measured = run.play_round(), run.evaluate()
    assert np.isfinite([report.loss, measured.loss]).all()
    assert measured.tested == (3,) * len(counts)
    moved = run.state()["params"] - run.model.initial
    assert (moved.abs().amax(dim=1) > 0).all()
    if METHODS[name].personal:
        assert measured.correct[0] == 3  # its only class
