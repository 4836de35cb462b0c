# What all scripts of this folder share; edit it on every machine alike.
SERVER=${SERVER:-@SERVER@}     # name or address of the server, as nodes reach it; certificates.sh writes it down
PORT=${PORT:-@PORT@}              # of the server, for nodes and for `flwr`
NODE_PORT=${NODE_PORT:-9094}   # of the first node on a machine, loopback only; node K has NODE_PORT + K

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export FLWR_HOME=${FLWR_HOME:-$HERE/flwr}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
cd "$HERE"
