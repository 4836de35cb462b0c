#!/usr/bin/env bash
# Flower's own command with this folder's server: ./flwr.sh list @NAME@, ./flwr.sh log RUN @NAME@ --stream,
# ./flwr.sh stop RUN @NAME@, ./flwr.sh supernode list @NAME@
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec flwr "$@"
