#!/usr/bin/env bash
# On a node, as root, before systemd starts it: two users. `pfedlms` holds the node's key and talks to the server;
# `pfedlms-app` runs the apps that the owner has approved, and can read neither the key nor change the allow-list.
# Call it again after ./keys.sh or ./approve.sh. What the apps need of this folder is named: data, or a module that reads them,
# as in `sudo ./users.sh data mine.py`. All else is closed to them.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
node=${NODE_USER:-pfedlms} app=${APP_USER:-pfedlms-app}
for user in "$node" "$app"; do
    id "$user" > /dev/null 2>&1 || useradd --system --user-group --no-create-home --shell /usr/sbin/nologin "$user"
done
group=$(id -gn "$app")
mkdir -p state audit flwr-app keys certificates
chown -R "$node:$group" .
chmod -R o-rwx,g-rwx .
chmod 750 . keys ./*.sh
chmod 640 environment.sh
for file in keys/launcher-secret keys/server.pub approved.jsonl; do [ ! -e "$file" ] || chmod 640 "$file"; done
[ $# = 0 ] || chmod -R g+rX -- "$@"
chown -R "$app:$group" state audit flwr-app
echo "$node holds the keys, $app runs the apps: systemctl enable --now pfedlms-node-K pfedlms-app-K"
