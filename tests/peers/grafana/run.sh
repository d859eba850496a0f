#!/usr/bin/env bash
# Checks the dashboard against Grafana's own types, which its project publishes on npm: every key and every value is valid.
# No Grafana runs here. ../prometheus.sh evaluates the queries.
#
#   tests/peers/grafana/run.sh
#
# Exit codes: 0 passed; 1 failed; 77 npm or the types are not available, nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/../../.."

skip() {
    echo "########################################################" >&2
    echo "## SKIPPED, THE BOARD WAS NOT COMPARED WITH GRAFANA'S TYPES: $1" >&2
    echo "########################################################" >&2
    exit 77
}

for program in npm npx python3; do
    command -v "$program" >/dev/null || skip "$program is not installed"
done
root=$PWD
folder=target/grafana
# A new copy each time, because the script rewrites the types in place.
rm -rf "$folder/node_modules"
mkdir -p "$folder"
cd "$folder"
echo '{"private": true}' > package.json
npm install --ignore-scripts --silent @grafana/schema@11.6.0 typescript@5.8.3 >&2 || skip "npm has no @grafana/schema"
python3 "$root/tests/peers/grafana/dashboard.py" "$root/deploy/dashboards/baton.json"
npx --no-install tsc --noEmit --strict --skipLibCheck --moduleResolution bundler --module esnext --target es2022 board.ts
echo "== the board is what Grafana 11.6's types say"
