#!/usr/bin/env bash
# Starts the run, or goes on with it, and shows its log: ./run.sh --run-config 'train.rounds=50' (all in one, of several
# Flower takes the last of a section). Another method or seed is another run: "method.name='fedavg' run.out='$PWD/fedavg'".
# Ctrl-C leaves the log, the run goes on: ./flwr.sh stop RUN @NAME@ ends it. Results: pfedlms show run
set -euo pipefail
source "$(dirname "$0")/environment.sh"
where=@NAME@
if [ "${1:-}" = simulation ]; then where=simulation && shift; fi
exec flwr run app "$where" --stream "$@"
