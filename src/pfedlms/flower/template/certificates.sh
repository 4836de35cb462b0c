#!/usr/bin/env bash
# On the server, once: an authority of your own and the server's certificate. Nodes get certificates/ca.crt, nothing else.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p certificates && chmod 700 certificates && cd certificates
umask 077
[ -e ca.key ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 3650 -subj "/CN=pfedlms" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout ca.key -out ca.crt
case $SERVER in *[!0-9.]*) also=DNS:$SERVER ;; *) also=IP:$SERVER ;; esac
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj "/CN=$SERVER" -keyout server.key -out server.csr
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -out server.pem \
    -extfile <(printf 'subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1,%s\nbasicConstraints=CA:FALSE\n' "$also")
rm server.csr
