# What all scripts of this folder share. Edit it on every machine alike.
export SERVER=${SERVER:-@SERVER@}     # name or address of the server, as nodes reach it; certificates.sh writes it into the certificate
export PORT=${PORT:-@PORT@}              # of the gate, for nodes; the only port that must be open
export LINK_PORT=${LINK_PORT:-@LINK_PORT@}    # of the SuperLink on the server, loopback only; flwr/config.toml has it, too
export NODE_PORT=${NODE_PORT:-9094}    # of the first node on a machine, loopback only; node K has NODE_PORT + K
export GATE_HOST=${GATE_HOST:-@GATE_HOST@}  # address that the gate listens on; empty: all addresses
export MAX_BODY=${MAX_BODY:-}          # bytes of the largest request that the gate passes; empty: as the model's messages need

umask 077
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export FLWR_HOME=${FLWR_HOME:-$HERE/flwr}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
unset FLWR_INTERNAL_GRPC_CONTROL_API FLWR_INTERNAL_GRPC_FLEET_API
cd "$HERE"

# The interpreter beside a command. Used as python=$(python_of NAME): a script ends where the command is missing.
python_of() {
    local found
    found=$(command -v "$1") || { echo "$1: is not on PATH; activate the environment of pfedlms" >&2 && return 1; }
    echo "$(dirname "$found")/python"
}

# Runs commands beside each other, one per argument; when one ends or this script is ended, all are.
together() {
    local each
    trap 'trap - INT TERM; kill $(jobs -p) 2>/dev/null; wait; exit 143' INT TERM
    for each in "$@"; do eval "$each &"; done
    wait -n || true
    kill $(jobs -p) 2>/dev/null || true
    wait || true
    trap - INT TERM
}
