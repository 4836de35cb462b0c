"""The allow-list of a machine: which apps it runs, by their hash, and with which settings.

A line of `approved.jsonl` is an app with the settings it may be run with. The machine's owner adds it with
`pfedlms deploy approve FOLDER`, from the copy of the app that the owner has read. The launcher compares a run with the
list before any code of the run's app is installed or executed.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from pfedlms.errors import PfedlmsError, UsageError, did_you_mean, printable, reason
from pfedlms.flower import audit

NODE, SERVER = "approved.jsonl", "approved-server.jsonl"
"""Allow-lists of a folder: for the nodes on this machine, and for its server."""


class NotApprovedError(PfedlmsError):
    """A run is not on this machine's allow-list."""


def build(app: Path) -> bytes:
    """The app as Flower sends it; the same bytes on every machine that has the same files."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own imports cause some
            from flwr.cli.build import build_fab_from_disk

            return bytes(build_fab_from_disk(app))
    except Exception as error:  # Flower raises what its parts do
        raise UsageError(f"{app}: cannot be built as an app of pfedlms[flower] ({reason(error)})") from error


def approve(folder: Path, settings: Mapping[str, Any], file: str = NODE) -> dict[str, Any]:
    """Add the app of this folder, with its own settings and these overrides, to an allow-list. Returns the entry."""
    described = folder / "app" / "pyproject.toml"
    if not described.is_file():
        raise UsageError(f"{folder}: got no app/pyproject.toml, expected a folder of: pfedlms deploy init {folder}")
    declared = declared_settings(described.read_text(encoding="utf-8"))
    for key in settings.keys() - declared.keys():
        raise UsageError(f"--run-config: got {key!r}, expected a key of {described}; {did_you_mean(key, declared)}")
    content = build(folder / "app")
    entry = {"app": _sha256(content), "configuration": configuration(content, settings), "settings": dict(settings)}
    if entry not in _entries(folder / file):
        audit.append(folder / file, "approved", **entry)
    return entry


def run_config(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings in `--run-config` arguments, read as Flower reads them."""
    texts = [value for option, value in pairwise(arguments) if option in ("--run-config", "-c")]
    if not texts:
        return {}
    try:
        from flwr.common.config import parse_config_args

        return dict(parse_config_args(texts))
    except Exception as error:  # Flower raises what its parser does
        raise UsageError(f"--run-config: cannot be read by pfedlms[flower] ({error})") from error


def check(file: Path, content: bytes, override: Mapping[str, Any]) -> str:
    """The hash of the app, if this run is approved; NotApprovedError says what to do if it is not."""
    app = _sha256(content)
    configurations = [entry["configuration"] for entry in _entries(file) if entry["app"] == app]
    if not configurations:
        remedy = "its owner reads the app and runs `pfedlms deploy approve FOLDER`"
        raise NotApprovedError(f"this machine has not approved app {app[:16]}; {remedy}")
    if configuration(content, override) not in configurations:
        changed = ", ".join(f"{key}={value}" for key, value in sorted(override.items()) if _needs_approval(key))
        got = f"this machine has approved app {app[:16]}, but not with {printable(changed) or 'its own settings'}"
        raise NotApprovedError(f"{got}; its owner runs `pfedlms deploy approve FOLDER --run-config '...'`")
    return app


def configuration(content: bytes, override: Mapping[str, Any]) -> str:
    """SHA-256 of all settings of a run that need approval."""
    try:
        with ZipFile(BytesIO(content)) as archive:
            settings = declared_settings(archive.read("pyproject.toml").decode()) | dict(override)
    except (BadZipFile, KeyError, ValueError, AttributeError) as error:
        raise NotApprovedError(f"the app cannot be read ({type(error).__name__})") from error
    approved = {key: value for key, value in settings.items() if _needs_approval(key)}
    return _sha256(json.dumps(approved, sort_keys=True).encode())


def declared_settings(pyproject: str) -> dict[str, Any]:
    """The run config that an app's pyproject.toml declares, by section and key: `train.rounds`."""
    sections = tomllib.loads(pyproject)["tool"]["flwr"]["app"].get("config", {})
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _needs_approval(key: str) -> bool:
    """Whether a setting counts: those about the server do not, nor those that a node's owner sets."""
    return key == "run.seed" or not key.startswith(("flower.", "run."))


def _entries(file: Path) -> list[dict[str, Any]]:
    """The entries of an allow-list, without a last line whose write was cut off."""
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    whole = [line for place, line in enumerate(lines, 1) if place < len(lines) or audit.is_json(line)]
    try:
        entries = [json.loads(line) for line in whole if line.strip()]
        return [{key: entry[key] for key in ("app", "configuration", "settings")} for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        remedy = "delete that line, and approve its app again with `pfedlms deploy approve FOLDER`"
        raise UsageError(f"{file}: holds a line that is no entry ({reason(error)}); {remedy}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
