#!/usr/bin/env bash
# On a node, after reading app/: its owner approves this app with its settings. Without that, no code of it is run here.
# ./approve.sh --run-config 'train.rounds=50' approves other settings as well, as ./run.sh takes them.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
python=$(python_of flwr)
exec "$python" -m pfedlms deploy approve "$HERE" "$@"
