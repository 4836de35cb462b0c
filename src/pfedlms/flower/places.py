"""Registration of nodes on the server: each place belongs to one key, whose node id Flower gives out.

python -m pfedlms.flower.places register FOLDER      keys/node-K.pub has place K
python -m pfedlms.flower.places revoke FOLDER K      node K is not let in any more
python -m pfedlms.flower.places started FOLDER ...   who starts a run, for the audit log; approves the app
"""

from __future__ import annotations

import getpass
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from pfedlms.errors import PfedlmsError, UsageError, shown
from pfedlms.flower import approval, audit
from pfedlms.flower.folder import NAME
from pfedlms.flower.gate import pem
from pfedlms.flower.keys import read_places

FILE, AUDIT = "places.json", "audit/server.jsonl"


def register(folder: Path) -> None:
    """Register keys that are new, revoke those they replace, and open the gate to them."""
    keys = {int(found[1]): file for file in (folder / "keys").glob("node-*.pub") if (found := _NUMBER.match(file.name))}
    if not keys:
        raise UsageError(f"{folder / 'keys'}: got no node-K.pub; ./keys.sh K makes one, on the node's machine")
    places = read_places(folder / FILE)
    for place, file in sorted(keys.items()):
        key, before = file.read_text(encoding="utf-8").strip(), places.get(place)
        if before and before["key"] == key:
            print(f"place {place} is of node {before['node']}, as before")
            continue
        if before:
            _unregister(folder, place, before["node"])
        places[place] = {"node": _registered(folder, file, key), "key": key}
        _write(folder, places)
        audit.append(folder / AUDIT, "registered", place=place, node=places[place]["node"], key=key)
        print(f"place {place} is of node {places[place]['node']}")
    _reload(folder)


def revoke(folder: Path, place: int) -> None:
    places = read_places(folder / FILE)
    if place not in places:
        raise UsageError(f"revoke: got {place}, expected one of {', '.join(map(str, sorted(places))) or 'no place'}")
    _unregister(folder, place, places.pop(place)["node"])
    _write(folder, places)
    public = folder / "keys" / f"node-{place}.pub"
    if public.exists():  # else the next ./register.sh would let it in again
        (folder / "keys" / "old").mkdir(mode=0o700, exist_ok=True)
        public.rename(folder / "keys" / "old" / f"{public.name}.revoked-{os.getpid()}")
    _reload(folder)
    print(f"place {place} is free; a new key in keys/node-{place}.pub gets it by ./register.sh")


def started(folder: Path, arguments: list[str]) -> None:
    """Who starts a run on the server, and with which app. What is in this folder is what the server approves."""
    settings = run_config(arguments)
    entry = approval.approve(folder, settings, approval.SERVER)
    who = {"user": getpass.getuser(), "uid": os.getuid(), "from": os.environ.get("SSH_CONNECTION", "this machine")}
    audit.append(folder / AUDIT, "start", **who, app=entry["app"], settings=settings)


def run_config(arguments: list[str]) -> dict[str, Any]:
    """Settings of `--run-config`, read as Flower reads them."""
    from flwr.common.config import parse_config_args

    texts = [arguments[i + 1] for i, each in enumerate(arguments[:-1]) if each in ("--run-config", "-c")]
    try:
        return dict(parse_config_args(texts)) if texts else {}
    except Exception as error:  # Flower raises what its parser does
        raise UsageError(f"--run-config: cannot be read ({error})") from error


_NUMBER = re.compile(r"node-(\d+)\.pub$")


def _registered(folder: Path, file: Path, key: str) -> int:
    """The id that Flower gives to a key."""
    done = flwr(folder, "supernode", "register", str(file), NAME, "--format", "json")
    if found := re.search(r'"node-id":\s*"?(\d+)', done.stdout):
        return int(found[1])
    if "code: 23" in done.stdout + done.stderr and (known := _known(folder, key)) is not None:
        return known
    raise UsageError(
        f"{file}: is not registered: {shown((done.stderr or done.stdout).strip())}; is superlink.sh running?"
    )


def _known(folder: Path, key: str) -> int | None:
    """The id of a key that is registered already, from the SuperLink's own file: its commands do not tell."""
    with sqlite3.connect(f"file:{folder / 'superlink.db'}?mode=ro", uri=True) as base:
        row = base.execute("SELECT node_id FROM node WHERE public_key = ?", (pem(key),)).fetchone()
    return None if row is None else int(row[0]) % 2**64


def _unregister(folder: Path, place: int, node: int) -> None:
    done = flwr(folder, "supernode", "unregister", str(node), NAME, "--format", "json")
    said = shown((done.stderr or done.stdout).strip())
    audit.append(folder / AUDIT, "revoked", place=place, node=node, flower=done.returncode)
    print(f"node {node} of place {place} is revoked" + (f" (Flower: {said})" if done.returncode else ""))


def flwr(folder: Path, *arguments: str, timeout: float | None = 120) -> subprocess.CompletedProcess[str]:
    """Flower's command of the same environment, with this folder's server."""
    environment = {
        **os.environ, "FLWR_HOME": str((folder / "flwr").resolve()), "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }  # fmt: skip
    beside = Path(sys.executable).parent / "flwr"
    command = [str(beside) if beside.exists() else "flwr", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def _write(folder: Path, places: dict[int, dict[str, Any]]) -> None:
    fresh = folder / f"{FILE}.new"
    fresh.touch(mode=0o600)
    fresh.write_text(
        json.dumps({str(place): each for place, each in sorted(places.items())}, indent=1), encoding="utf-8"
    )
    fresh.replace(folder / FILE)


def _reload(folder: Path) -> None:
    """A gate that runs reads its keys again."""
    pid = folder / "gate" / "nginx.pid"
    if pid.exists() and pid.read_text().strip():
        subprocess.run([str(folder / "gate.sh"), "--reload"], check=True, capture_output=True, timeout=60)


def main(arguments: list[str]) -> int:
    what, folder, *rest = arguments
    try:
        if what == "register":
            register(Path(folder))
        elif what == "revoke":
            for place in rest:
                revoke(Path(folder), int(place))
        else:
            started(Path(folder), rest)
    except PfedlmsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
