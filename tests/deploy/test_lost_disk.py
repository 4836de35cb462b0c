"""A node that lost its disk is sent w, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fleet import CLIENTS, Fleet, configured, served

from pfedlms.deploy.envelope import decode
from pfedlms.engine.transport import Code

LOST = 2


@pytest.mark.parametrize("method", ["sketchmean", "stc", "sketchvote"])
def test_a_node_that_lost_its_disk_is_sent_what_it_lacks_and_goes_on(method: str, tmp_path: Path) -> None:
    """It refuses the next answer, because it knows none. Then it is sent all of them, or what they have changed."""
    config = configured(method, tmp_path / "run", train={"rounds": 7})

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == LOST and decode(request).trip == 4:
            path = fleet.node(LOST).path
            fleet.close(LOST)
            path.unlink()
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", way)
    with pytest.warns(UserWarning, match=f"round 4: client {LOST} is left out: refused, order"):
        _, metrics = served(config, fleet)
    back = [each.code for each in decode(fleet.trips[5][LOST][0]).records]
    assert back[:2] == [Code.ANSWER if method == "sketchvote" else Code.MODEL, Code.ANSWER]
    assert [sorted(each["left_out"]) for each in metrics] == [[]] * 3 + [[str(LOST)]] * 2 + [[]] * 2
    assert metrics[4]["bytes"]["catch_up"] == metrics[6]["bytes"]["catch_up"] > 0
    kept = [fleet.node(client).state for client in range(CLIENTS)]
    for name in ("model", "scale") if method == "sketchmean" else ("model",):
        assert all(torch.equal(own.cohort.state[name], kept[0].cohort.state[name]) for own in kept)
    assert {own.answers_known for own in kept} == {7}
