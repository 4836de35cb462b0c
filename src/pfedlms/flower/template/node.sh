#!/usr/bin/env bash
# Node @NODE@: its place, state, data and device. Data of its own: data="folder:PATH", "file:PATH" or "module:function", with
# paths from this folder and modules in it.
# It is started again whenever it ends: the server takes a node that was killed in again only after 40 seconds.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
for file in certificates/ca.crt keys/node-@NODE@; do
    [ -e "$file" ] || { echo "$file: is missing; README.md says where it comes from" >&2 && exit 1; }
done
export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH}
trap 'trap - TERM; kill "$node" 2>/dev/null; exit' INT TERM
while true; do
    flower-supernode --superlink "$SERVER:$PORT" --root-certificates certificates/ca.crt \
        --auth-supernode-private-key keys/node-@NODE@ --port $((NODE_PORT + @NODE@)) \
        --node-config "partition-id=@NODE@ state=\"$HERE/state\" device=\"cpu\"" "$@" &
    node=$!
    wait "$node" || echo "node @NODE@ ended with $?; it is started again in 5 s"
    sleep 5
done
