"""Federated methods by name."""

from __future__ import annotations

from pfedlms.methods.base import Exchange, Method, Objective, Task
from pfedlms.methods.fedavg import FedAvg
from pfedlms.methods.local import Local
from pfedlms.methods.pfedlms import PFedLMS

METHODS: dict[str, type[Method]] = {method.name: method for method in (PFedLMS, FedAvg, Local)}

__all__ = ["METHODS", "Exchange", "Method", "Objective", "Task"]
