#!/usr/bin/env bash
# On the server, while superlink.sh runs: ./revoke.sh K ends the registration of node K and closes the gate to its key.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec "$(python_of flwr)" -m pfedlms.flower.places revoke "$HERE" "$@"
