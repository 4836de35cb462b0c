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
