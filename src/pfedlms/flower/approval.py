"""Which runs this machine takes part in: an allow-list of apps, by their hash, and of configurations.

A line of `approved.jsonl` is an app with the settings it may be run with. The machine's owner writes it with
`pfedlms deploy approve FOLDER`, from the copy of the app that the owner has read. The launcher compares a run with it
before any code of the run's app is installed or executed.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from pfedlms.errors import PfedlmsError, UsageError, printable
from pfedlms.flower import audit

NODE, SERVER = "approved.jsonl", "approved-server.jsonl"
"""Allow-lists of a folder: of the nodes on this machine, and of its server."""
_SERVERS = ("flower.", "run.")
_SEED = "run.seed"


class NotApprovedError(PfedlmsError):
    """A run is not on this machine's allow-list."""


def build(app: Path) -> bytes:
    """The app as Flower sends it; the same bytes on every machine that has the same files."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower itself imports
            from flwr.cli.build import build_fab_from_disk

            return bytes(build_fab_from_disk(app))
    except Exception as error:  # Flower raises what its parts do
        raise UsageError(f"{app}: cannot be built as a Flower app ({type(error).__name__}: {error})") from error


def approve(folder: Path, settings: Mapping[str, Any], file: str = NODE) -> dict[str, Any]:
    """Add the app of this folder, with its own settings and these on top, to an allow-list."""
    content = build(folder / "app")
    entry = {"app": _sha256(content), "configuration": configuration(content, settings), "settings": dict(settings)}
    if entry not in _entries(folder / file):
        audit.append(folder / file, "approved", **entry)
    return entry


def run_config(arguments: list[str]) -> dict[str, Any]:
    """Settings of `--run-config`, read as Flower reads them."""
    from flwr.common.config import parse_config_args

    texts = [arguments[i + 1] for i, each in enumerate(arguments[:-1]) if each in ("--run-config", "-c")]
    try:
        return dict(parse_config_args(texts)) if texts else {}
    except Exception as error:  # Flower raises what its parser does
        raise UsageError(f"--run-config: cannot be read ({error})") from error


def check(file: Path, content: bytes, override: Mapping[str, Any]) -> str:
    """The hash of an approved app; NotApprovedError says what to do about one that is not."""
    app, entries = _sha256(content), _entries(file)
    same = [each for each in entries if each["app"] == app]
    if not same:
        raise NotApprovedError(
            f"this machine has not approved app {app[:16]}; its owner compares the app with the server's and runs "
            "`pfedlms deploy approve FOLDER`"
        )
    if configuration(content, override) not in [each["configuration"] for each in same]:
        changed = ", ".join(f"{key}={value}" for key, value in sorted(override.items()) if not _is_servers(key))
        raise NotApprovedError(
            f"this machine has approved app {app[:16]}, but not with {printable(changed) or 'its own settings'}; its "
            "owner runs `pfedlms deploy approve FOLDER --run-config '...'`"
        )
    return app


def configuration(content: bytes, override: Mapping[str, Any]) -> str:
    """SHA-256 of all settings of a run that matter on a node."""
    try:
        with ZipFile(BytesIO(content)) as archive:
            settings = declared(archive.read("pyproject.toml").decode()) | dict(override)
    except (BadZipFile, KeyError, ValueError, AttributeError) as error:
        raise NotApprovedError(f"the app cannot be read ({type(error).__name__})") from error
    kept = {key: value for key, value in settings.items() if not _is_servers(key)}
    return _sha256(json.dumps(kept, sort_keys=True).encode())


def declared(pyproject: str) -> dict[str, Any]:
    """The run config that an app's pyproject.toml declares, by section and key: `train.rounds`."""
    sections = tomllib.loads(pyproject)["tool"]["flwr"]["app"].get("config", {})
    return {f"{section}.{key}": value for section, own in sections.items() for key, value in own.items()}


def _is_servers(key: str) -> bool:
    """Whether a setting is about the server, or left to the node's owner."""
    return key.startswith(_SERVERS) and key != _SEED


def _entries(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{key: each[key] for key in ("app", "configuration", "settings")} for each in lines]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
