#!/usr/bin/env bash
# On the server: starts the run, or resumes it, and shows its log: ./run.sh --run-config 'train.rounds=50' (all in one: of several
# Flower takes the last of a section). Another method or seed is another run: "method.name='fedavg' run.out='$PWD/fedavg'".
# Ctrl-C leaves the log and the run continues: ./flwr.sh stop RUN @NAME@ ends it. Results: pfedlms show run
set -euo pipefail
source "$(dirname "$0")/environment.sh"
where=@NAME@ python=$(python_of flwr)
if [ "${1:-}" = simulation ]; then where=simulation && shift; else "$python" -m pfedlms.flower.gate started "$HERE" "$@"; fi
exec flwr run app "$where" --stream "$@"
