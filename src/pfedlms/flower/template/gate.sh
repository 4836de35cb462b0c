#!/usr/bin/env bash
# The gate on the server: nginx passes what nodes need to the SuperLink, from known keys, and refuses everything else.
# ./gate.sh --reload makes a running gate read keys, certificates and limits again; register.sh and revoke.sh do that.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
command -v nginx > /dev/null || { echo "nginx: is not installed (version 1.20 or later is needed)" >&2 && exit 1; }
mkdir -p gate
python=$(python_of flower-superlink)
"$python" -m pfedlms.flower.gate write "$HERE"
nginx=(nginx -p "$HERE/" -c "$HERE/gate.conf" -e "$HERE/gate/error.log")
if [ "${1:-}" = --reload ]; then exec "${nginx[@]}" -s reload; fi
exec "${nginx[@]}" -g 'daemon off;'
