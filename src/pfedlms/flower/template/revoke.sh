#!/usr/bin/env bash
# On the server, while superlink.sh runs: ./revoke.sh K ends the registration of node K and closes the gate to its key.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
python=$(python_of flwr)
exec "$python" -m pfedlms.flower.gate revoke "$HERE" "$@"
