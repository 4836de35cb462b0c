"""Which nodes the gate accepts, with real processes, and what the check of a server reports."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from flotilla import Flotilla, free_port, long, needs_flower, wait_until

from pfedlms.flower.check import _check_server, listening_addresses
from pfedlms.flower.folder import write_folder

ONLINE = "SuperNode ID:"


@pytest.fixture(scope="module")
def flotilla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flotilla]:
    with Flotilla(tmp_path_factory.mktemp("doors") / "three", 3) as made:
        yield made.open()


def supernode(flotilla: Flotilla, name: str, *options: str) -> str:
    """The log of a node started by hand, which is ended once it is online, refused, or after 30 s."""
    node_config = f'partition-id=0 state="{flotilla.folder}/{name}"'
    command = ["flower-supernode", "--superlink", f"127.0.0.1:{flotilla.port}", "--port", str(free_port())]
    flotilla.start(name, *command, "--max-retries", "1", "--node-config", node_config, *options)
    try:
        wait_until(lambda: ONLINE in flotilla.log_text(name) or flotilla.started[name].poll() is not None, 30, "an end")
    except AssertionError:
        return flotilla.log_text(name) + "\nstill trying"
    finally:
        flotilla.kill(name)
    return flotilla.log_text(name)


@needs_flower
@long
def test_only_nodes_with_known_keys_and_tls_are_accepted(flotilla: Flotilla) -> None:
    root = ["--root-certificates", "certificates/ca.crt"]
    key = ["--auth-supernode-private-key", "keys/node-0"]
    assert ONLINE in supernode(flotilla, "right", *root, *key)
    flotilla.call("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "unknown")
    other = flotilla.folder.parent / "other"
    write_folder(other, 1)
    flotilla.call(str(other / "certificates.sh"))
    other_authority = str(other / "certificates" / "ca.crt")
    for name, options, reason in [
        ("unknown-key", [*root, "--auth-supernode-private-key", "unknown"], ""),
        ("no-key", root, ""),
        ("wrong-authority", ["--root-certificates", other_authority, *key], "CERTIFICATE_VERIFY_FAILED"),
        ("plaintext", ["--insecure"], "400 Bad Request"),
    ]:
        log = supernode(flotilla, name, *options)
        assert ONLINE not in log, name
        assert reason in log, log


# --- checks of a server, without Flower and without nginx


def make_certificates(folder: Path) -> Path:
    """The certificates of a new folder."""
    write_folder(folder, 1)
    subprocess.run(["./certificates.sh"], cwd=folder, check=True, capture_output=True)
    return folder / "certificates"


def serve_once(context: ssl.SSLContext | None, port: int) -> threading.Thread:
    """Accept one connection, by TLS or without."""
    listener = socket.create_server(("127.0.0.1", port))

    def serve() -> None:
        with listener, listener.accept()[0] as taken:
            try:
                with context.wrap_socket(taken, server_side=True) if context else taken as one:
                    one.recv(1)
                    one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            except OSError:
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_the_check_says_why_a_server_cannot_be_reached(tmp_path: Path) -> None:
    own, other_authority = make_certificates(tmp_path / "f"), make_certificates(tmp_path / "g") / "ca.crt"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / "server.pem", own / "server.key")
    for served, trusted, expected in [
        (context, own / "ca.crt", "is there, TLSv1."),
        (context, other_authority, "its certificate is refused"),
        (None, own / "ca.crt", "cannot be reached by TLS"),
    ]:
        port = free_port()
        thread = serve_once(served, port)
        found = _check_server(f"127.0.0.1:{port}", trusted)
        thread.join()
        assert expected in found.said
        assert found.wrong == (expected != "is there, TLSv1.")
    assert (
        "cannot be reached by TLS (Connection refused)"
        in _check_server(f"127.0.0.1:{free_port()}", other_authority).said
    )
    assert "ca.crt: is missing" in _check_server("127.0.0.1:1", tmp_path / "ca.crt").said


def test_listening_addresses_of_a_port_are_found() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")):
        try:
            made = socket.create_server((address, 0), family=family)
        except OSError:
            continue  # no IPv6 here
        with made:
            assert listening_addresses(made.getsockname()[1]) == {ip_address(address)}
