#!/usr/bin/env bash
# Node @NODE@: its place, state, data and device, in `config` below. Data of its own is data=\"file:PATH\", \"folder:PATH\" or
# \"module:function\", with paths from this folder and modules in it:
#     config="partition-id=@NODE@ state=\"$HERE/state\" device=\"cpu\" data=\"file:patients.csv\""
# State of runs that nobody continues is removed after `keep` days.
# It is started again whenever it ends: the server takes a node that was killed in again only after 40 seconds.
# `./node-@NODE@.sh supernode` and `./node-@NODE@.sh app` start one half each, for users of their own: the second runs the
# apps, and needs no key of the node.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
half=both
case ${1:-} in supernode | app) half=$1 && shift ;; esac
if [ "$half" = app ]; then export FLWR_HOME=$HERE/flwr-app; fi
needed=(keys/launcher-secret keys/server.pub approved.jsonl)
[ "$half" = app ] || needed+=(certificates/ca.crt keys/node-@NODE@)
for file in "${needed[@]}"; do
    [ -e "$file" ] || { echo "$file: is missing; README.md says where it comes from" >&2 && exit 1; }
done
export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH}
python=$(python_of flower-supernode) port=$((NODE_PORT + @NODE@)) key="server-key=\"$HERE/keys/server.pub\""
config="partition-id=@NODE@ state=\"$HERE/state\" device=\"cpu\" keep=90"
if [ "${1:-}" = --node-config ]; then config=$2; fi
supernode='"$python" -m pfedlms.flower.supernode --superlink "$SERVER:$PORT" --root-certificates certificates/ca.crt --isolation process \
    --auth-supernode-private-key keys/node-@NODE@ --host 127.0.0.1 --port "$port" \
    --superexec-auth-secret-file keys/launcher-secret --node-config "$config $key"'
app='"$python" -m pfedlms.flower.launcher node "$HERE" "127.0.0.1:$port"'
while true; do
    case $half in both) together "$supernode" "$app" ;; supernode) together "$supernode" ;; app) together "$app" ;; esac
    echo "node @NODE@ ended; it is started again in 5 s"
    sleep 5
done
