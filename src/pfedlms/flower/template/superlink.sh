#!/usr/bin/env bash
# The server. It listens on all addresses (HOST=127.0.0.1: on this machine only), knows nodes by their keys alone, and keeps
# what it knows of them in superlink.db. Its log is on standard error; the run's own is shown by run.sh.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec flower-superlink --host "${HOST:-0.0.0.0}" --port "$PORT" --database "$HERE/superlink.db" \
    --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.pem --ssl-keyfile certificates/server.key \
    --enable-supernode-auth --disable-runtime-dependency-installation "$@"
