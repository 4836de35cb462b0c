#!/usr/bin/env bash
# Node @NODE@: its place, state, data and device. Data of its own: data="folder:PATH", data="file:PATH" or data="module:function".
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec flower-supernode --superlink "$SERVER:$PORT" --root-certificates certificates/ca.crt \
    --auth-supernode-private-key keys/node-@NODE@ --port $((NODE_PORT + @NODE@)) \
    --node-config "partition-id=@NODE@ state=\"$HERE/state\" device=\"cpu\"" "$@"
