"""bits, methods, datasets, models, settings: the commands that list."""

from __future__ import annotations

import argparse

from pfedlms.cli.options import add, overrides
from pfedlms.cli.screen import show
from pfedlms.errors import UsageError


def add_bits(sub: argparse.ArgumentParser) -> None:
    """Bits of one client and round, from messages that are encoded and decoded; FedProto as if every client held every
    class."""
    add(
        sub,
        *("method", "model", "clients", "dataset"),
        method="method by name (default: all)",
        model="model by name (default: the data set's)",
        clients="number of clients (default: 20)",
        dataset="take sample shape, model and classes from this data set (default: mnist; 32x32 images for vgg)",
    )
    sub.add_argument("--classes", type=int, metavar="C", help="number of classes (default: the data set's)")
    add(sub, "--set", "--import", "--json")


def bits(options: argparse.Namespace) -> None:
    from pfedlms.experiment.cost import bits_table
    from pfedlms.report import plans

    chosen = overrides(options)
    rows = bits_table(chosen, options.classes)
    show(options, rows[0] if "name" in chosen.get("method", {}) else rows, plans.bits, rows)


def add_listing(sub: argparse.ArgumentParser) -> None:
    """List the names to choose from."""
    add(sub, "--import", "--json")


def add_methods(sub: argparse.ArgumentParser) -> None:
    """List the methods. check MODULE:CLASS: check a method of your own."""
    sub.add_argument("what", nargs="?", choices=["check"], metavar="check", help="check a method of your own")
    sub.add_argument("method", nargs="?", metavar="MODULE:CLASS", help="check: the method's class")
    add_listing(sub)


def listing(options: argparse.Namespace) -> None:
    from pfedlms.cli import listings
    from pfedlms.report.tables import table_of

    rows = getattr(listings, options.command)()
    show(options, rows, table_of, rows)


def methods(options: argparse.Namespace) -> int:
    if options.what is None:
        listing(options)
        return 0
    from pfedlms.engine.method_check import check_method
    from pfedlms.experiment.plugins import resolve

    if not options.method:
        raise UsageError("methods check: say which, for example: pfedlms methods check my_methods:FedProx")
    report = check_method(resolve(options.method))
    print(report)
    return 0 if report.ok else 1
