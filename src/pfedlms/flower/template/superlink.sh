#!/usr/bin/env bash
# The server, on this machine's loopback address only: nodes reach it through gate.sh. It knows nodes by their keys, and keeps
# what it knows of them in superlink.db. Runs are started by run.sh on this machine. Its log is on standard error.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
for file in certificates/server.pem keys/launcher-secret keys/server-signing.key; do
    [ -e "$file" ] || { echo "$file: is missing; run ./certificates.sh and ./keys.sh server" >&2 && exit 1; }
done
python=$(python_of flower-superlink)
together '"$python" -m pfedlms.flower.superlink --host 127.0.0.1 --port "$LINK_PORT" --database "$HERE/superlink.db" --isolation process \
        --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.pem --ssl-keyfile certificates/server.key \
        --superexec-auth-secret-file keys/launcher-secret --enable-supernode-auth \
        --disable-runtime-dependency-installation' \
    '"$python" -m pfedlms.flower.launcher server "$HERE" "127.0.0.1:$LINK_PORT" certificates/ca.crt'
exit 1
