#!/usr/bin/env bash
# On the server, while it runs: lets in the nodes whose public keys lie in keys/, as often as there are new ones.
# `./flwr.sh supernode list @NAME@` prints their ids, by which flower.nodes in app/pyproject.toml pins places to them.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
failed=0
for key in ${1:-keys/*.pub}; do
    [ -e "$key" ] || { echo "$key: is not there; keys.sh makes keys, on the node's machine" >&2 && exit 1; }
    if said=$(flwr supernode register "$key" @NAME@ 2>&1); then
        echo "$said"
    elif [[ $said == *"code: 23"* ]]; then
        echo "$key: is known already"
    else
        echo "$said" >&2
        failed=1
    fi
done
exit $failed
