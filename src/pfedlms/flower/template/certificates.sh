#!/usr/bin/env bash
# On the server: an authority of your own, once, and the server's certificate, anew each time. Nodes get certificates/ca.crt.
#   ./certificates.sh                  the server's certificate is renewed: ./gate.sh --reload, and start superlink.sh again
#   ./certificates.sh --passphrase     the authority's key is kept under a passphrase, which every renewal asks for
#   ./certificates.sh --new-authority  the old authority and all it signed are worth nothing any more: give ca.crt to all nodes
# certificates/ca.key is needed for renewals only: keep it offline, and bring it back for them.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
mkdir -p certificates
chmod 700 certificates
cd certificates
protection=-nodes
for option in "$@"; do
    case $option in
        --passphrase) protection= ;;
        --new-authority)
            mkdir -p old
            for file in ca.key ca.crt server.key server.pem; do [ ! -e "$file" ] || mv "$file" "old/$file.$(date -u +%Y%m%dT%H%M%SZ)"; done ;;
        *) echo "./certificates.sh: got $option, expected --passphrase or --new-authority" >&2 && exit 2 ;;
    esac
done
if [ -e ca.crt ] && [ ! -e ca.key ]; then
    echo "certificates/ca.key: is missing; bring it back from where it is kept, or make a --new-authority" >&2
    exit 1
fi
[ -e ca.crt ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 $protection -days 3650 -subj "/CN=pfedlms" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout ca.key -out ca.crt
name=${SERVER#[}
name=${name%]}
case $name in
    *:*) also=IP:$name ;;
    *[!0-9.]*) also=DNS:$name ;;
    *) also=IP:$name ;;
esac
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj "/CN=pfedlms server" -keyout server.key -out server.csr
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 397 -out server.pem \
    -extfile <(printf 'subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1,%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$also")
rm server.csr
