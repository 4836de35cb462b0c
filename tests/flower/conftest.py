"""Fixtures and imports that all tests over Flower use."""

import warnings
from importlib.util import find_spec

from fleet import close_nodes

if find_spec("flwr") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flower's own imports
        import flwr.cli.build
        import flwr.supernode.fleet_http_connection  # noqa: F401

__all__ = ["close_nodes"]
