"""What tests of nodes share."""

from fleet import closed_nodes

__all__ = ["closed_nodes"]
