"""Per-client tensors of an objective and a second local training on nodes, with absent clients and momentum."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import configured
from test_same_run import check


@pytest.mark.parametrize("method", ["scaffold", "ditto", "fedrep"])
def test_on_nodes_as_in_one_process(method: str, tmp_path: Path) -> None:
    chosen = {"participation": 0.5, "rounds": 5, "momentum": 0.5}
    check(configured(method, tmp_path / "run", clients=6, train=chosen), tmp_path)


def test_epochs_and_uniform_weights_on_nodes(tmp_path: Path) -> None:
    """A node knows its own number of steps; stacked clients take as many as the largest of them."""
    chosen = {"participation": 0.5, "rounds": 4, "local_epochs": 0.5, "weights": "uniform"}
    check(configured("scaffold", tmp_path / "run", clients=6, train=chosen), tmp_path)
