"""What there is to choose from, as rows: `pfedlms methods`, `datasets`, `models` and `settings`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from pfedlms.data import DATASETS
from pfedlms.experiment.config import CUSTOM, SECTIONS
from pfedlms.experiment.cost import bits_table
from pfedlms.methods import METHODS
from pfedlms.models import MODELS, build, flat_layout

Rows = list[dict[str, Any]]


def methods() -> Rows:
    """Name, what is kept, bits per parameter for the paper's MNIST model, and the paper."""
    rows = []
    costs = {cost["method"]: cost for cost in reversed(bits_table())}  # a method's default downlink comes first
    for method in METHODS.values():
        cost = costs[method.name]
        rows.append(
            {
                "name": method.name,
                "keeps": "personal models" if method.personal else "one global model",
                "bits/parameter ↑": round(cost["up_payload_bits"] / cost["parameters"], 4),
                "bits/parameter ↓": round(cost["down_payload_bits"] / cost["parameters"], 4),
                "paper": method.paper,
            }
        )
    return rows


def datasets() -> Rows:
    return [
        {
            "name": name,
            "classes": source.classes,
            "shape": "x".join(map(str, source.shape)),
            "needs --data-dir": "yes" if source.needs_dir else "no",
            "what": source.description,
        }
        for name, source in DATASETS.items()
    ]


def models() -> Rows:
    rows = []
    for name, entry in MODELS.items():
        layout = flat_layout(build(name, (1, 28, 28) if name == "dnn" else (3, 32, 32), 10, 256, 0))
        parameters = f"{layout.dim:,}"
        rows.append(
            {
                "name": name,
                "parameters, 10 classes": parameters,
                "layers": len(layout.layers),
                "what": entry.description,
            }
        )
    return rows


def settings() -> Rows:
    """Every key; methods may share a name with another default and meaning, so each row says whose it is."""
    owners = [(section, "all", cls) for section, cls in SECTIONS.items()]
    owners += [("method", name, method.Settings) for name, method in METHODS.items()]
    return [
        {"setting": f"{section}.{each.name}", "for": name, "default": each.default, "meaning": _meaning(each)}
        for section, name, cls in owners
        for each in fields(cls)
    ]


def _meaning(declared: Field[Any]) -> str:
    choices = declared.metadata["choices"]
    values = [value for value in choices() if value != CUSTOM] if choices else []
    return f"{declared.metadata['help']} ({', '.join(values)})" if values else str(declared.metadata["help"])


LISTINGS: dict[str, Callable[[], Rows]] = {
    "methods": methods,
    "datasets": datasets,
    "models": models,
    "settings": settings,
}
