"""Runs between a server and nodes: handlers from bytes to bytes, for any transport that carries the bytes."""

from pfedlms.deploy.coordinator import Coordinator, serve
from pfedlms.deploy.node import Node
from pfedlms.deploy.nodes import Transport

__all__ = ["Coordinator", "Node", "Transport", "serve"]
