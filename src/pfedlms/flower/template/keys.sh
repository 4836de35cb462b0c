#!/usr/bin/env bash
# A key a node: ./keys.sh K, on the node's machine, or ./keys.sh for all. The server gets keys/node-K.pub, nothing else.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p keys && chmod 700 keys
for node in ${1:-@NODES@}; do
    [ -e "keys/node-$node" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "pfedlms node $node" -f "keys/node-$node"
done
