"""Methods of one's own on nodes: per-client tensors and a second local training there, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import configured
from test_same_run import check

from own_methods import Ditto, Scaffold
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method


@pytest.mark.parametrize("method", [Scaffold, Ditto])
def test_on_nodes_as_in_one_process(method: type[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, method.name, method)
    chosen = {"participation": 0.5, "rounds": 5, "momentum": 0.5}
    check(configured(method.name, tmp_path / "run", clients=6, train=chosen), tmp_path)
