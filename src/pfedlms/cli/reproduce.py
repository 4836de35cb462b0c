"""reproduce: the tables and figures of the pFedLMS paper, which are beside the package, in `papers/pfedlms`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pfedlms.errors import UsageError


def add_reproduce(sub: argparse.ArgumentParser) -> None:
    """Its options are those of `python -m papers.pfedlms`."""


def reproduce(options: argparse.Namespace) -> int:
    """`python -m papers.pfedlms`, where a clone of the repository has it."""
    clone = Path(__file__).parents[3]
    if (clone / "papers" / "pfedlms").is_dir() and str(clone) not in sys.path:
        sys.path.append(str(clone))
    try:
        from papers.pfedlms.__main__ import main
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("papers"):
            raise
        raise UsageError(
            "reproduce: the tables of the paper are not in the installed package, but in the folder papers/ of its "
            "repository; clone that and repeat the command there"
        ) from error
    return main(options.rest, "pfedlms reproduce")
