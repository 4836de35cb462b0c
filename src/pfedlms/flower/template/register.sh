#!/usr/bin/env bash
# On the server, while it runs: lets in the nodes whose public keys lie in keys/. `flwr supernode list @NAME@` prints their
# ids, by which flower.nodes in app/pyproject.toml pins places to them.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
for key in ${1:-keys/*.pub}; do flwr supernode register "$key" @NAME@; done
