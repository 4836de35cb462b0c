"""One round: bytes are counted as they pass, awkward clients take part, what breaks is named."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from torch import nn

import factories
from factories import played, small_data, small_module
from pfedlms.errors import DivergedError
from pfedlms.methods import METHODS
from pfedlms.wire.frames import HEADER_BYTES

federation = partial(factories.federation, module=small_module(), local_steps=2, batch_size=8)

# Two layers: 30 and 28 parameters, padded to 32, m = floor(3.2) = 3. T = 7 takes 3 bits a symbol: ceil(9 / 8) = 2 bytes
# for each layer; two float32 a layer: 16 bytes. FedAvg: 58 float32. OBDA: 58 bits.
BY_HAND = {"pfedlms": (2, 16 + 4, 16 + 4), "fedavg": (1, 232, 232), "obda": (1, 8, 8), "local": (0, 0, 0)}


@pytest.mark.parametrize(("cohort_size", "participation"), [(0, 1.0), (1, 1.0), (2, 1.0), (0, 0.67)])
@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_by_hand_for_each_client_that_takes_part(name: str, cohort_size: int, participation: float) -> None:
    exchanges, up, down = BY_HAND[name]
    data, clients = small_data(20, 30, 40), round(3 * participation)
    run = federation(name, data, cohort_size=cohort_size, participation=participation)
    traffic = run.play_round().traffic
    framing = clients * HEADER_BYTES * exchanges
    assert traffic.as_tuple() == (clients * up, framing, clients * down, framing, 0)
    assert traffic.total == clients * (up + down) + 2 * framing


def test_the_loss_of_a_round_is_weighted_by_samples() -> None:
    """Steps too small to move a model, and as many as see every sample equally often: the mean over all samples."""
    data, model = small_data(8, 32), small_module()
    data.x[data.train[1]] *= 5  # so that the two clients' losses differ
    got = federation("local", data, local_steps=4, learning_rate=1e-30, weight_decay=0.0).play_round().loss
    seen = np.concatenate(data.train)
    expected = nn.functional.cross_entropy(model.double()(data.x[seen].double()), data.y[seen]).item()
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
def test_divergence_names_round_and_client(cohort_size: int) -> None:
    """Client 2 alone sees infinite values; the others are fine."""
    data = small_data(20, 20, 20, 20)
    data.x[data.train[2]] = np.inf
    with pytest.raises(DivergedError, match=r"before round 1.* client 2 .*train\.learning_rate"):
        federation("local", data, cohort_size=cohort_size).start()


@pytest.mark.parametrize("name", METHODS)
def test_awkward_clients(name: str) -> None:
    """One with a single class; one with a single sample and one with three, where batches are of eight."""
    data = small_data(30, 1, 3)
    for own in (data.train[0], data.test[0]):
        data.y[own] = 1
    run = played(federation(name, data, local_steps=5), 2)
    report, measured = run.play_round(), run.evaluate()
    assert np.isfinite([report.loss, measured.loss]).all()
    assert measured.tested == (3, 3, 3)
    moved = run.state()["params"] - run.model.initial
    assert (moved.abs().amax(dim=1) > 0).all()
    if METHODS[name].personal:
        assert measured.correct[0] == 3  # a personal model has nothing else to learn


@pytest.mark.parametrize("name", METHODS)
def test_a_single_client(name: str) -> None:
    run = federation(name, small_data(20))
    assert np.isfinite([run.play_round().loss for _ in range(2)]).all()
    assert run.evaluate().tested == (3,)
