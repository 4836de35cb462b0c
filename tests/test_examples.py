"""examples/one_round.py computes the same round as the package."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import one_round as example
import pytest
from torch import nn

from factories import federation, recorded_messages, seeded
from pfedlms.data import FederatedData, batch_positions, from_pairs
from pfedlms.engine import Federation
from pfedlms.quantise import normal_quantiles, thresholds_of
from pfedlms.sketch import Sketch
from pfedlms.wire.frames import SERVER

SEED = 7
# Twenty steps in float32 whose sums run in another order: each step rounds parameters of about 1 by 6e-8, and most of
# that evens out (1e-7 was seen). A λ or ρ that was wrong by a per cent would show as 1e-4.
WITHIN = {"rtol": 0, "atol": 2e-6}


@pytest.fixture
def data() -> FederatedData:
    return from_pairs([(own, own) for own in example.made_up_clients()])


@pytest.fixture
def engine(data: FederatedData) -> Federation:
    layers = (nn.Linear(example.FEATURES, example.HIDDEN), nn.ReLU(), nn.Linear(example.HIDDEN, example.CLASSES))
    return federation(
        "pfedlms", data, seeded(lambda: nn.Sequential(*layers)), seed=SEED,
        thresholds=example.T, ratio=example.RATIO, strength=example.STRENGTH, smoothing=example.SMOOTHING,
        local_steps=example.STEPS, batch_size=example.BATCH, learning_rate=example.RATE, weight_decay=example.DECAY,
    )  # fmt: skip


def batches_of(data: FederatedData, phase: int) -> list[np.ndarray]:
    """The batches of every client's local steps of one phase, as the engine draws them."""
    first = phase * example.STEPS
    return [
        batch_positions(SEED, client, count, first, example.STEPS, example.BATCH)
        for client, count in enumerate(data.samples)
    ]


def test_a_round_has_the_bits_of_the_package(engine: Federation, data: FederatedData) -> None:
    """Sketches, thresholds, symbols and consensus to the bit; models within rounding. Two rounds, so two Φ."""
    clients = example.made_up_clients()
    engine.start()
    for round in range(2):
        before = engine.state()["params"]
        models = list(before.numpy())
        with recorded_messages() as messages:
            engine.play_round()
        agreed = example.exchanges(models, clients, SEED, round)

        sketched = Sketch(engine.model.layout, example.RATIO, SEED, round).forward(before).numpy()
        down = {name: value for sent in messages if sent.sender == SERVER for name, value in sent.values.items()}
        tau = thresholds_of(down["mean"], down["deviation"], normal_quantiles(example.T))
        symbols = {sent.sender: sent.values["symbols"] for sent in messages if "symbols" in sent.values}
        for client, theta in enumerate(models):
            parts = list(zip(example.split(theta), agreed, strict=True))
            own = np.concatenate([about.phi.forward(part) for part, about in parts])
            assert own.dtype == np.float32
            assert own.tobytes() == sketched[client].tobytes()
            chosen = np.concatenate([example.symbols(about.phi.forward(part), about.tau) for part, about in parts])
            assert chosen.tolist() == symbols[client].tolist()
        assert np.array([about.deviation for about in agreed]).tobytes() == down["deviation"].tobytes()
        assert np.stack([about.tau for about in agreed]).tobytes() == tau.tobytes()
        assert np.concatenate([about.consensus for about in agreed]).tolist() == symbols[SERVER].tolist()

        batches = batches_of(data, phase=round + 1)
        after, alone = (np.stack(example.train(models, clients, batches, consensus)) for consensus in (agreed, []))
        np.testing.assert_allclose(engine.state()["params"].numpy(), after, **WITHIN)
        assert (np.abs(after - alone).max(axis=1) > 1000 * WITHIN["atol"]).all()  # the pull is well within sight


def test_a_layer_with_deviation_zero_is_not_pulled() -> None:
    about = example.Agreed(example.Phi(SEED, 0, 1), np.float32(0), np.zeros(example.T), np.ones(16))
    assert not example.pull(np.ones(example.LAYERS[1], dtype=np.float32), about).any()


def test_the_example_imports_only_numpy_and_the_standard_library() -> None:
    tree = ast.parse(Path(example.__file__).read_text(encoding="utf-8"))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imports = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    assert froms | imports == {"__future__", "math", "numpy", "statistics", "typing"}
