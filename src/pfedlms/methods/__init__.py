"""Federated methods by name."""

from __future__ import annotations

import re

from pfedlms.methods.contract import (
    Exchange,
    FieldMeans,
    Method,
    Objective,
    PerClient,
    Task,
    Tracked,
    go_on_from,
)
from pfedlms.methods.decomfl import DeComFL
from pfedlms.methods.ditto import Ditto
from pfedlms.methods.eden import EDEN
from pfedlms.methods.fedavg import FedAvg
from pfedlms.methods.fedper import FedPer
from pfedlms.methods.fedproto import FedProto
from pfedlms.methods.fedprox import FedProx
from pfedlms.methods.fedrep import FedRep
from pfedlms.methods.fetchsgd import FetchSGD
from pfedlms.methods.finetune import Finetune
from pfedlms.methods.local import Local
from pfedlms.methods.obcsaa import OBCSAA
from pfedlms.methods.obda import OBDA
from pfedlms.methods.pfed1bs import PFed1BS
from pfedlms.methods.pfedlms import PFedLMS
from pfedlms.methods.scaffold import Scaffold
from pfedlms.methods.sketchmean import SketchMean
from pfedlms.methods.sketchvote import SketchVote
from pfedlms.methods.sparseloco import SparseLoCo
from pfedlms.methods.stc import STC
from pfedlms.methods.zsign import ZSign

_ALL: tuple[type[Method], ...] = (
    SketchVote, SketchMean, PFedLMS, PFed1BS, FedAvg, FedProx, Scaffold, STC, SparseLoCo, FetchSGD, EDEN, ZSign,
    OBCSAA, OBDA, DeComFL, Ditto, FedPer, FedRep, FedProto, Finetune, Local,
)  # fmt: skip
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}
_SECTIONS = "data|method|model|run|train"


def check_name(name: str) -> None:
    """Refuse the name of a method that would be read as a section of settings, as several methods, or as a path."""
    if not re.fullmatch(rf"(?!({_SECTIONS})$)[A-Za-z][\w.-]*", name):
        raise ValueError(
            f"method: got the name {name!r}, expected letters, digits, '_', '-' and '.', and none of {_SECTIONS}"
        )


def register(method: type[Method]) -> type[Method]:
    """Make a method of your own known by its name; use as a decorator. The same class may be defined again, as in a
    cell of a notebook that is run twice; then the later one counts."""
    check_name(method.name)
    known = METHODS.get(method.name, method)
    if (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):
        raise ValueError(f"method: the name {method.name!r} is taken by {known.__name__}; choose another")
    METHODS[method.name] = method
    return method


__all__ = [
    "METHODS",
    "Exchange",
    "FieldMeans",
    "Method",
    "Objective",
    "PerClient",
    "Task",
    "Tracked",
    "go_on_from",
    "register",
]
