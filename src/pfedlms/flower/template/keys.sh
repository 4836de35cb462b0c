#!/usr/bin/env bash
# Makes keys that are not there yet, each on the machine that keeps its private half:
#   ./keys.sh server      on the server: the key that signs requests; nodes get keys/server.pub, nothing else
#   ./keys.sh K           on node K: its key; the server gets keys/node-K.pub, nothing else
#   ./keys.sh             all of them, where all run on one machine
#   ./keys.sh --rotate K  a new key in place of the old one, which goes to keys/old; then ./register.sh on the server
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p keys
chmod 700 keys
if [ "${1:-}" = --rotate ]; then
    shift
    [ $# -gt 0 ] || { echo "./keys.sh --rotate: expected server or the number of a node" >&2 && exit 2; }
    mkdir -p keys/old
    for which in "$@"; do
        case $which in server) files=(keys/server-signing.key keys/server.pub) ;; *) files=("keys/node-$which" "keys/node-$which.pub") ;; esac
        [ -e "${files[0]}" ] || { echo "./keys.sh --rotate $which: ${files[0]} is not on this machine; call it where it is (if it is lost: rm -f ${files[1]} and ./keys.sh $which)" >&2 && exit 2; }
        for file in "${files[@]}"; do [ ! -e "$file" ] || mv "$file" "keys/old/$(basename "$file").$(date -u +%Y%m%dT%H%M%SZ)"; done
    done
fi
[ -e keys/launcher-secret ] || head -c 32 /dev/urandom | base64 > keys/launcher-secret
for which in ${@:-server @NODES@}; do
    if [ "$which" = server ]; then
        if [ -e keys/server.pub ] && [ ! -e keys/server-signing.key ]; then
            echo "./keys.sh: keys/server.pub is that of the server, on another machine; ./keys.sh K makes the key of a node (if its private half is lost: rm keys/server.pub)" >&2 && exit 2
        fi
        [ -e keys/server-signing.key ] || openssl genpkey -algorithm ed25519 -out keys/server-signing.key
        openssl pkey -in keys/server-signing.key -pubout -out keys/server.pub
    elif [[ ! $which =~ ^[0-9]+$ ]]; then
        echo "./keys.sh: got $which, expected server or the number of a node" >&2 && exit 2
    else
        [ -e "keys/node-$which" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "pfedlms node $which" -f "keys/node-$which"
    fi
done
