"""Methods, data sets, models and settings as rows of tables; one function for each command of that name."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from pfedlms.data import DATASETS
from pfedlms.data.sources import PATHS
from pfedlms.experiment.config import CUSTOM, owners
from pfedlms.experiment.cost import bits_table
from pfedlms.experiment.plugins import load_plugins
from pfedlms.methods import METHODS
from pfedlms.models import MODELS, build, flat_layout

Rows = list[dict[str, Any]]


def methods() -> Rows:
    """Name, what is kept, bits per parameter for the paper's MNIST model, and the paper."""
    load_plugins()
    costs = {cost["method"]: cost for cost in reversed(bits_table())}  # a method's default downlink comes first
    return [
        {
            "name": name,
            "keeps": "personal models" if method.personal else "one global model",
            "bits/parameter ↑": round(costs[name]["up_payload_bits"] / costs[name]["parameters"], 4),
            "bits/parameter ↓": round(costs[name]["down_payload_bits"] / costs[name]["parameters"], 4),
            "paper": method.paper,
        }
        for name, method in METHODS.items()
    ]


def datasets() -> Rows:
    own = {"classes": "–", "shape": "–", "needs --data-dir": "no"}
    named = [
        {
            "name": name,
            "classes": source.classes,
            "shape": "x".join(map(str, source.shape)),
            "needs --data-dir": "yes" if source.needs_dir else "no",
            "what": source.description,
        }
        for name, source in DATASETS.items()
    ]
    return [*named, *({"name": f"{kind}:PATH", **own, "what": what} for kind, what in PATHS.items())]


def models() -> Rows:
    load_plugins()
    layouts = {name: flat_layout(build(name, entry.example, 10, 256, 0)) for name, entry in MODELS.items()}
    return [
        {
            "name": name,
            "parameters, 10 classes": f"{layouts[name].dim:,}",
            "layers": len(layouts[name].layers),
            "what": entry.description,
        }
        for name, entry in MODELS.items()
    ]


def settings() -> Rows:
    """Every key; methods may share a name with another default and meaning, so each row says whose it is."""
    return [
        {"setting": f"{section}.{each.name}", "for": name, "default": each.default, "meaning": _meaning(each)}
        for section, name, cls in owners(METHODS)
        for each in fields(cls)
    ]


def _meaning(declared: Field[Any]) -> str:
    choices = declared.metadata["choices"]
    values = [value for value in choices() if value != CUSTOM] if choices else []
    return f"{declared.metadata['help']} ({', '.join(values)})" if values else str(declared.metadata["help"])
