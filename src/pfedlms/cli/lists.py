"""bits, methods, datasets, models, settings: the commands that list."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from pfedlms.cli.options import add_options, output, overrides
from pfedlms.errors import UsageError
from pfedlms.report.tables import table_from_records

Rows = list[dict[str, Any]]


def add_bits(sub: argparse.ArgumentParser) -> None:
    """Bits of one client and round, of all methods or one, from messages that are encoded and decoded; FedProto as if
    every client held every class. Without --dataset samples are those of mnist, for the VGGs 32x32 in colour."""
    add_options(sub, "method", "model", "clients", "dataset")
    sub.add_argument("--classes", type=int, metavar="C", help="number of classes (default: the data set's)")
    add_options(sub, "--set", "--import", "--json")


def bits(options: argparse.Namespace) -> None:
    from pfedlms.experiment.cost import bits_table
    from pfedlms.report import plans

    tables = overrides(options)
    rows = bits_table(tables, options.classes)
    output(options, rows[0] if "name" in tables.get("method", {}) else rows, plans.message_table, rows)


def add_listing(sub: argparse.ArgumentParser) -> None:
    """List the names to choose from."""
    add_options(sub, "--import", "--json")


def add_methods(sub: argparse.ArgumentParser) -> None:
    """List the methods. check MODULE:CLASS: check a method of your own."""
    sub.add_argument("what", nargs="?", choices=["check"], metavar="check", help="check a method of your own")
    sub.add_argument("method", nargs="?", metavar="MODULE:CLASS", help="check: the method's class")
    help = "check: a setting of the method; may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="method.KEY=VALUE", help=help)
    add_listing(sub)


def listing(options: argparse.Namespace) -> None:
    rows = {"methods": list_methods, "datasets": datasets, "models": models, "settings": settings}[options.command]()
    output(options, rows, table_from_records, rows)


def methods(options: argparse.Namespace) -> int:
    if options.what is None:
        listing(options)
        return 0
    from pfedlms.engine.method_check import check_method
    from pfedlms.experiment.plugins import find_object
    from pfedlms.methods.contract import Method
    from pfedlms.settings import parse

    if not options.method:
        raise UsageError("methods check: say which, for example: pfedlms methods check my_methods:FedProx")
    method = find_object(options.method)
    declared = {field.name: field for field in fields(getattr(method, "Settings", Method.Settings))}
    settings = {}
    for text in options.set:
        place, _, value = text.partition("=")
        key = place.rpartition(".")[2].strip()
        settings[key] = parse(declared[key], value) if key in declared else value
    report = check_method(method, **settings)
    print(report)
    return 0 if report.ok else 1


def list_methods() -> Rows:
    """Name, kind of models, bits per parameter for the paper's MNIST model, and the paper."""
    from pfedlms.experiment.cost import bits_table
    from pfedlms.experiment.plugins import load_plugins
    from pfedlms.methods import METHODS

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
    from pfedlms.data.sources import DATASETS, PATHS

    unknown = {"classes": "–", "shape": "–", "needs --data-dir": "no"}
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
    return [*named, *({"name": f"{kind}:PATH", **unknown, "what": what} for kind, what in PATHS.items())]


def models() -> Rows:
    from pfedlms.experiment.plugins import load_plugins
    from pfedlms.models import MODELS, build, flat_layout

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
    """Every key, once for each method that has it: methods may have the same key with another default and meaning."""
    from pfedlms.experiment.schema import SECTIONS
    from pfedlms.methods import METHODS
    from pfedlms.settings import CUSTOM

    rows = []
    common = [(section, "all", cls) for section, cls in SECTIONS.items()]
    for section, name, cls in [*common, *(("method", name, method.Settings) for name, method in METHODS.items())]:
        for key in fields(cls):
            about, choices = key.metadata["help"], key.metadata["choices"] or list
            values = ", ".join(value for value in choices() if value != CUSTOM)
            meaning = f"{about} ({values})" if values else about
            rows.append({"setting": f"{section}.{key.name}", "for": name, "default": key.default, "meaning": meaning})
    return rows
