"""bits, methods, datasets, models, settings: what there is to choose from, and what it costs."""

from __future__ import annotations

import argparse

from pfedlms.cli.options import add_json, add_options, add_set, overrides
from pfedlms.cli.screen import show
from pfedlms.report.plans import bits as bits_of
from pfedlms.report.tables import table_of


def add_bits(sub: argparse.ArgumentParser) -> None:
    """Bits of one client and round, from messages that are encoded and decoded; FedProto as if every client held every
    class."""
    add_options(
        sub,
        *("method", "model", "clients", "dataset"),
        method="method by name (default: all)",
        model="model by name (default: the data set's)",
        clients="number of clients (default: 20)",
        dataset="take sample shape, model and classes from this data set (default: mnist; 32x32 images for vgg)",
    )
    sub.add_argument("--classes", type=int, metavar="C", help="number of classes (default: the data set's)")
    add_set(sub)
    add_json(sub)


def bits(options: argparse.Namespace) -> None:
    from pfedlms.experiment.cost import bits_table

    chosen = overrides(options)
    rows = bits_table(chosen, options.classes)
    show(options, rows[0] if "name" in chosen.get("method", {}) else rows, bits_of, rows)


def add_listing(sub: argparse.ArgumentParser) -> None:
    """List what there is to choose from."""
    add_json(sub)


def listing(options: argparse.Namespace) -> None:
    from pfedlms.cli import listings

    rows = getattr(listings, options.command)()
    show(options, rows, table_of, rows)
