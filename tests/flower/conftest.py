"""What tests over Flower share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import FLEETS


@pytest.fixture(autouse=True)
def closed_nodes() -> Iterator[None]:
    """Nodes in this process hold their directories until they are closed."""
    yield
    while FLEETS:
        fleet = FLEETS.pop()
        for client in list(fleet.nodes):
            fleet.close(client)
