#!/usr/bin/env bash
# `baton router` in front of a vLLM pair, stock or with the BatonConnector. Prints SKIPPED without vLLM. See README.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
vllm=${VLLM:-vllm}
if ! command -v "$vllm" >/dev/null 2>&1; then
    echo "SKIPPED: the router was not tried in front of vLLM: no command \`$vllm\` (set VLLM; see tests/peers/README.md)"
    exit 0
fi
if [ -z "${BATON_BIN:-}" ]; then
    for candidate in "$root/target/release/baton" "$root/target/debug/baton"; do
        if [ -x "$candidate" ]; then
            export BATON_BIN=$candidate
            break
        fi
    done
fi
export VLLM=$vllm
exec "${PYTHON:-python3}" "$root/tests/peers/vllm_pair.py" "$@"
