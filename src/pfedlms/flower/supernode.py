"""Flower's SuperNode, which ends where that of flwr 1.41 stays alive without a connection: after an error of TLS.

    python -m pfedlms.flower.supernode OPTIONS      as flower-supernode takes them

A certificate that has expired, or another program at the gate's port, is such an error. `node-K.sh` starts the node
again, which then reads ca.crt anew. It also logs why a server does not let the node in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

TLS_FAILED = 3
"""The exit code after an error of TLS."""
UNKNOWN_KEY = 401
_WORDS_OF_TLS = ("certificate", "ssl", "tls")


def end_after_tls_error(make: Callable[[], Any], end: Callable[[int], Any] = os._exit) -> Callable[[], Any]:
    """Flower's `make_simple_http_retry_invoker`, whose retries end the process by `end` where they would give up."""

    def make_invoker() -> Any:
        invoker, log = make(), logging.getLogger("flwr")
        gives_up = invoker.should_giveup

        def should_give_up(error: Exception) -> bool:
            response = getattr(error, "response", None)  # which there is if the connection is fine
            if getattr(response, "status_code", None) == UNKNOWN_KEY:
                log.error("pfedlms: the server does not let this node in: its key is not registered, or was revoked")
            elif response is None and any(word in str(error).lower() for word in _WORDS_OF_TLS):
                log.error("pfedlms: no TLS connection to the server (%s); the node is started again", error)
                end(TLS_FAILED)
            return bool(gives_up(error))

        invoker.should_giveup = should_give_up
        return invoker

    return make_invoker


if __name__ == "__main__":
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    connection.make_simple_http_retry_invoker = end_after_tls_error(connection.make_simple_http_retry_invoker)
    import_module("flwr.supernode.cli").flower_supernode()
