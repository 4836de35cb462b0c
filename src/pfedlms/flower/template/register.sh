#!/usr/bin/env bash
# On the server, while superlink.sh runs: lets in the nodes whose public keys lie in keys/, and pins place K to the key
# node-K.pub in places.json. Call it again whenever a key is new or was rotated: the key that had the place before is revoked.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
python=$(python_of flwr)
exec "$python" -m pfedlms.flower.gate register "$HERE"
