#!/usr/bin/env bash
# Starts the run, or goes on with it, and shows its log: ./run.sh --run-config 'train.rounds=50'. Results: pfedlms show run
set -euo pipefail
source "$(dirname "$0")/environment.sh"
where=@NAME@
if [ "${1:-}" = simulation ]; then where=simulation && shift && set -- --run-config "flower.state=\"$HERE/state\"" "$@"; fi
exec flwr run app "$where" --stream "$@"
