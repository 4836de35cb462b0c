"""The fixture that all tests of nodes use."""

from fleet import close_nodes

__all__ = ["close_nodes"]
