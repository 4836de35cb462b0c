"""Runs on Flower's SuperLink and SuperNodes; needs the extra `flower`.

Flower carries bytes between `pfedlms.deploy.serve` on the server and a `pfedlms.deploy.Node` on each node; nothing in
this folder knows a method. `pfedlms deploy init DIR` writes the app that `flwr run` takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def server(file: str | Path, problem: Any = None) -> Any:
    """The ServerApp of the run that a TOML file describes.

    Args:
        file: the configuration; keys of Flower's run config override it.
        problem: `pfedlms.Problem(model=…, loss=…, metric=…)`, if the configuration has "custom" for one of them.
    """
    from pfedlms.flower import apps

    return apps.server_app(Path(file), problem)


def client(file: str | Path, problem: Any = None) -> Any:
    """The ClientApp of the same run; see `server`."""
    from pfedlms.flower import apps

    return apps.client_app(Path(file), problem)
