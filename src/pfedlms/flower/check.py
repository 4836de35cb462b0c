"""`pfedlms deploy check`: finds what would keep a run from starting."""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from pfedlms import __version__
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.errors import PfedlmsError, UsageError, printable
from pfedlms.flower.approval import SERVER, approve
from pfedlms.flower.carrier import CHECK_RECORD
from pfedlms.flower.config import app_settings, has_parts_in_python
from pfedlms.flower.folder import NAME, read_environment
from pfedlms.flower.gate import call_flwr

FLOWER = "1.41"
"""The version whose commands the folder's scripts call."""
_TIMEOUT = 10.0
"""Seconds for a connection to the server."""
_WAIT = 15
"""`flower.wait` of the run that asks nodes."""
_CLOSED_PATHS = (
    "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task",
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/pull-messages", "/docs",
)  # fmt: skip
"""Paths that the gate must refuse to a client without a key."""
_REFUSALS = (401, 404, 405)
_SECRET_FILES = ("keys/*", "certificates/*.key", "state/*", "superlink.db")
_LISTEN = "0A"
"""State of a listening socket in Linux's /proc/net/tcp."""


@dataclass(frozen=True)
class CheckResult:
    what: str
    said: str
    wrong: bool = False


def check(folder: Path, server: str | None = None) -> list[CheckResult]:
    """Check versions, the configuration with its digest, file permissions, whether the gate can be reached by TLS, and
    whether it refuses what nodes do not need. Unless a `server` is named, also check that the SuperLink listens on
    loopback only, and ask the nodes in a run of its own."""
    named = read_environment(folder, "SERVER", "PORT", "LINK_PORT")
    named |= {name: os.environ[name] for name in named if name in os.environ}
    results = [_check_versions(), *_check_configuration(folder / "app", server is None), *_check_secret_files(folder)]
    address, authority = server or f"{named['SERVER']}:{named['PORT']}", folder / "certificates" / "ca.crt"
    results.append(_check_server(address, authority))
    if not results[-1].wrong:
        results.append(_check_closed_paths(address, authority))
    if server is None:
        results.append(_check_superlink(int(named["LINK_PORT"])))
        if not any(result.wrong for result in results):
            results += _check_nodes(folder)
    return results


def _check_versions() -> CheckResult:
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        installed = "is not installed"
    fits = installed.startswith(f"{FLOWER}.")
    expected = "" if fits else f", expected {FLOWER}: pip install 'pfedlms[flower]'"
    return CheckResult("versions", f"pfedlms {__version__}, flwr {installed}{expected}", not fits)


def _check_configuration(app: Path, on_server: bool) -> list[CheckResult]:
    """With a model, loss or metric given in Python, the digest is known only where app.py is executed. The file of
    places is on the server only."""
    try:
        config, flower = app_settings(app)
        if on_server:
            flower.pinned_nodes(config.data.clients)
        digest = "as app.py makes it" if has_parts_in_python(config) else RunSetup(config).run.hex()
        return [CheckResult("configuration", f"{config.method}, {config.data.clients} places, digest {digest}")]
    except (KeyError, AttributeError, ValueError) as error:
        return [CheckResult("configuration", f"{app / 'pyproject.toml'}: no run config ({error})", wrong=True)]
    except PfedlmsError as error:
        return [CheckResult("configuration", line, wrong=True) for line in str(error).splitlines()]


def _check_secret_files(folder: Path) -> list[CheckResult]:
    """Find secrets that other users of this machine can read."""
    if not folder.stat().st_mode & 0o007:
        return []
    files = [path for name in _SECRET_FILES for path in folder.glob(name) if path.suffix not in (".pub", ".crt")]
    open_to_all = [str(path.relative_to(folder)) for path in files if path.stat().st_mode & 0o007]
    text = f"others can read {', '.join(open_to_all[:3])}; chmod 700 {folder}"
    return [CheckResult("files", text, wrong=True)] if open_to_all else []


def _check_superlink(port: int) -> CheckResult:
    """Check that the SuperLink listens on this machine's loopback addresses only."""
    addresses = listening_addresses(port)
    listens = f"listens on {', '.join(sorted(map(str, addresses)))}, port {port}"
    if not addresses:
        return CheckResult("superlink", f"nothing listens on port {port}; is superlink.sh running?", wrong=True)
    if not all(address.is_loopback for address in addresses):
        return CheckResult("superlink", f"{listens}, expected 127.0.0.1 alone; start it with superlink.sh", wrong=True)
    return CheckResult("superlink", listens)


def listening_addresses(port: int) -> set[IPv4Address | IPv6Address]:
    """Addresses of this machine on which a process listens at this port."""
    addresses = set[IPv4Address | IPv6Address]()
    for file, size in (("/proc/net/tcp", 8), ("/proc/net/tcp6", 32)):
        for line in Path(file).read_text().splitlines()[1:] if Path(file).exists() else ():
            local, state = line.split()[1], line.split()[3]
            if state != _LISTEN or int(local[size + 1 :], 16) != port:
                continue
            # The file has words of four bytes, each in the machine's byte order.
            order = -1 if sys.byteorder == "little" else 1
            address = ip_address(b"".join(bytes.fromhex(local[i : i + 8])[::order] for i in range(0, size, 8)))
            addresses.add(getattr(address, "ipv4_mapped", None) or address)
    return addresses


def _connection(address: str, authority: Path) -> HTTPSConnection:
    """A TLS connection that trusts the folder's authority; its first use opens it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--server: got {address!r}, expected HOST:PORT, for example 192.168.0.10:8000")
    context = ssl.create_default_context(cafile=str(authority))
    return HTTPSConnection(host.strip("[]"), int(port), timeout=_TIMEOUT, context=context)


def _check_server(address: str, authority: Path) -> CheckResult:
    try:
        with closing(_connection(address, authority)) as connection:
            connection.connect()
            certificate = dict(connection.sock.getpeercert() or {})
            ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
            text = f"{address} is there, {connection.sock.version()}, its certificate is of {authority.name}"
            return CheckResult("server", f"{text}, until {ends:%Y-%m-%d}")
    except FileNotFoundError:
        text = f"{authority}: is missing; certificates.sh makes it on the server, copy it from there"
    except ssl.SSLCertVerificationError as error:
        remedy = "is ca.crt the server's, SERVER its name, and this machine's clock right? ./certificates.sh renews it"
        text = f"{address}: its certificate is refused ({error.verify_message}); {remedy}"
    except OSError as error:
        text = f"{address}: cannot be reached by TLS ({error.strerror or error}); is gate.sh running, the port open?"
    return CheckResult("server", text, wrong=True)


def _check_closed_paths(address: str, authority: Path) -> CheckResult:
    """Check that the nodes' address refuses everything that nodes do not need."""
    for path in _CLOSED_PATHS:
        try:
            with closing(_connection(address, authority)) as connection:
                connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
                status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            return CheckResult("doors", f"{address}{path}: no answer ({error or type(error).__name__})", wrong=True)
        if status not in _REFUSALS:
            who = "whoever reaches this address can run code on all machines; nodes must reach gate.sh"
            return CheckResult("doors", f"{address}{path}: answers with {status}: {who}", wrong=True)
    return CheckResult("doors", f"{address} refuses {len(_CLOSED_PATHS)} paths of the SuperLink that nodes do not need")


def _check_nodes(folder: Path) -> list[CheckResult]:
    """Start a run that only asks the nodes, and read the results in its log."""
    approve(folder, {}, SERVER)
    settings = f"flower.check=true flower.wait={_WAIT}"
    done = call_flwr(folder, "run", "app", NAME, "--stream", "--run-config", settings, timeout=None)
    lines = [re.sub(r"\x1b\[\d+m", "", line).strip() for line in (done.stdout + done.stderr).splitlines()]
    records = [json.loads(line.partition(CHECK_RECORD)[2]) for line in lines if CHECK_RECORD + "{" in line]
    if records:
        return [CheckResult("nodes", record["text"], record["wrong"]) for record in records]
    last = [line for line in lines if line][-5:] or ["flwr run: said nothing"]
    return [CheckResult("nodes", printable(line), wrong=True) for line in last]
