"""What tests over Flower share."""

import warnings
from importlib.util import find_spec

from fleet import closed_nodes

if find_spec("flwr") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Flower's own imports warn of
        import flwr.cli.build
        import flwr.supernode.fleet_http_connection  # noqa: F401

__all__ = ["closed_nodes"]
