"""The gate: nginx with the shipped configuration in front of a server that accepts every request."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from flotilla import free_port, wait_until

from pfedlms.flower.check import _check_closed_paths, _check_superlink, listening_addresses
from pfedlms.flower.folder import write_folder
from pfedlms.flower.gate import key_header, largest_body, write_includes, write_places

pytestmark = pytest.mark.skipif(
    shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="nginx is not installed"
)


@dataclass
class Gate:
    folder: Path
    port: int
    link_port: int
    key: str
    passed: list[str] = field(default_factory=list)
    """Paths of the requests that reached the server."""

    def connect(self) -> ssl.SSLSocket:
        """By TLS without a client certificate."""
        context = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.crt"))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def raw(self, data: bytes) -> bytes:
        """The gate's response to these bytes."""
        with self.connect() as safe:
            safe.sendall(data)
            found = b""
            while b"\r\n" not in found and (more := safe.recv(4096)):
                found += more
            return found

    def status(self, path: str, method: str = "POST", key: str | None = "", body: bytes = b"", **headers: str) -> int:
        named = self.key if key == "" else key
        lines = [f"{method} {path} HTTP/1.1", "Host: gate", f"Content-Length: {len(body)}"]
        lines += [f"flwr-public-key: {named}"] * (named is not None)
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        answer = self.raw("\r\n".join([*lines, "", ""]).encode() + body)
        return int(answer.split()[1]) if answer else 0


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate") / "f"
    made = Gate(folder, free_port(), free_port(), "")
    write_folder(folder, 2, "fedavg", port=made.port, link_port=made.link_port)
    for script in ("./certificates.sh", "./keys.sh"):
        subprocess.run([script], cwd=folder, check=True, capture_output=True)
    public = (folder / "keys" / "node-0.pub").read_text().strip()
    write_places(folder, {0: {"node": 70, "key": public}})
    made.key = key_header(public)

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.passed.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_PUT = do_POST

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", made.link_port), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificates" / "server.pem", folder / "certificates" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    write_includes(folder, {"PORT": str(made.port), "LINK_PORT": str(made.link_port), "GATE_HOST": "127.0.0.1"})
    command = ["nginx", "-p", f"{folder}/", "-c", str(folder / "gate.conf"), "-e", str(folder / "gate" / "error.log")]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    process = subprocess.Popen([*command, "-g", "daemon off;"], env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: listening_addresses(made.port), 20, "the gate listens")
    yield made
    process.terminate()
    process.wait(20)
    server.shutdown()
    server.server_close()


FLEET_PATHS = [
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
        "confirm-message-received", "get-run", "get-fab", "pull-object", "push-object",
    )
]  # fmt: skip
"""The calls of a node of flwr 1.41 with a key."""


def test_calls_of_nodes_pass(gate: Gate) -> None:
    gate.passed.clear()
    assert [gate.status(path, body=b"x" * 100) for path in FLEET_PATHS] == [200] * len(FLEET_PATHS)
    assert gate.passed == FLEET_PATHS
    assert gate.status("/v1/fleet/push-object", body=bytes(largest_body(gate.folder))) == 200


CLOSED = [
    "/v1/control/start-run", "/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/docs",
    "/openapi.json", "/health", "/", "/v1/fleet/", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
    "/v1/fleet/../control/start-run", "/v1/fleet/pull-messages/../../control/start-run", "/v1/./fleet/pull-messages",
    "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run", "/v1%2ffleet/pull-messages",
    "/v1/fleet/pull%2dmessages", "//v1/fleet/pull-messages", "/v1//fleet/pull-messages", "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages?x=1", "/v1/fleet/pull-messages#x", "/v1/fleet/pull-messages;x", "/V1/FLEET/PULL-MESSAGES",
    "/v1/fleet/pull-messages%00", "/v1/fleet/pull-messages\\..\\..\\control",
]  # fmt: skip


@pytest.mark.parametrize("path", CLOSED)
def test_all_other_paths_are_refused(path: str, gate: Gate) -> None:
    """With a registered key as well as without one: 400, 401, 404 or 405, and nothing reaches the server."""
    gate.passed.clear()
    found = [gate.status(path), gate.status(path, key=None), gate.status(path, method="GET")]
    found.append(gate.status(f"https://127.0.0.1{path}"))
    assert set(found) <= {400, 401, 404, 405}, found
    assert gate.passed == []


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"key": None}, 401),
        ({"key": "AAAA"}, 401),
        ({"key": "x" * 20_000}, 400),
        ({"method": "GET"}, 405),
        ({"method": "PUT"}, 405),
        ({"method": "TRACE"}, 405),
        ({"body": bytes(5000)}, 413),
    ],
)
def test_wrong_keys_methods_and_sizes_are_refused(case: dict[str, object], expected: int, gate: Gate) -> None:
    gate.passed.clear()
    assert gate.status("/v1/fleet/push-messages", **case) == expected  # type: ignore[arg-type]
    assert gate.passed == []


def test_a_body_of_gibibytes_is_refused_before_it_is_read(gate: Gate) -> None:
    for length in (f"Content-Length: {3 << 29}", "Transfer-Encoding: chunked"):
        head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: gate\r\nflwr-public-key: {gate.key}\r\n{length}\r\n\r\n"
        size = largest_body(gate.folder)
        chunk = f"{size + 1:x}\r\n".encode() + bytes(size + 1) + b"\r\n0\r\n\r\n" if "chunked" in length else b""
        assert b" 413 " in gate.raw(head.encode() + chunk)


def test_two_lengths_in_one_request_are_refused(gate: Gate) -> None:
    """So that the gate and the SuperLink never read different requests from the same bytes."""
    gate.passed.clear()
    inner = "POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for lengths in (
        f"Content-Length: {len(inner)}\r\nTransfer-Encoding: chunked",
        f"Content-Length: 0\r\nContent-Length: {len(inner)}",
    ):
        head = f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nflwr-public-key: {gate.key}\r\n{lengths}\r\n\r\n"
        assert b" 400 " in gate.raw((head + inner).encode())
    assert gate.passed == []


def test_a_flood_is_limited(gate: Gate) -> None:
    """One TLS connection, many requests."""
    request = f"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\nflwr-public-key: {gate.key}\r\nContent-Length: 0\r\n\r\n"
    with gate.connect() as safe:
        safe.sendall(request.encode() * 600)
        found, end = b"", time.monotonic() + 10
        while found.count(b"HTTP/1.1 ") < 600 and time.monotonic() < end and (more := safe.recv(65536)):
            found += more
    assert found.count(b"HTTP/1.1 503 ") > 100
    assert found.count(b"HTTP/1.1 200 ") >= 100
    wait_until(lambda: gate.status("/v1/fleet/get-run") == 200, 20, "the gate lets nodes in again")


def test_old_versions_of_tls_are_refused(gate: Gate) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", gate.port), timeout=10) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


def test_the_log_names_refused_requests(gate: Gate) -> None:
    gate.status("/v1/control/start-run", key=None)
    gate.status("/v1/fleet/pull-messages\x1b[2J", key=None)
    text = (gate.folder / "gate" / "access.log").read_text()
    assert "\x1b" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    found = [each for each in lines if each["path"] == "/v1/control/start-run"]
    assert found[-1]["status"] in (401, 404)
    assert (found[-1]["node"], found[-1]["from"]) == ("", "127.0.0.1")


def test_the_check_finds_open_paths(gate: Gate) -> None:
    """The gate closes them. A server that accepts them itself, or listens on all addresses, is named."""
    authority = gate.folder / "certificates" / "ca.crt"
    assert not _check_closed_paths(f"127.0.0.1:{gate.port}", authority).wrong
    found = _check_closed_paths(f"127.0.0.1:{gate.link_port}", authority)
    assert found.wrong
    assert "/v1/control/list-runs: answers with 200: whoever reaches this address can run code" in found.said
    assert not _check_superlink(gate.link_port).wrong
    with socket.create_server(("0.0.0.0", 0)) as exposed:
        port = exposed.getsockname()[1]
        found = _check_superlink(port)
    assert found.wrong
    assert f"listens on 0.0.0.0, port {port}, expected 127.0.0.1 alone" in found.said
    assert "nothing listens" in _check_superlink(free_port()).said
