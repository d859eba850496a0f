#!/usr/bin/env bash
# NIXL with its real library, from PyPI: every promise of a transport, kill -9, SIGSTOP, aborts, stale reads, reads larger
# than any request may be, and whole engines. No GPU, CUDA or RDMA. The library goes into a folder of its own, unless
# BATON_NIXL_LIBRARY names one.
#
#   tests/peers/nixl.sh [ROUNDS]      ROUNDS of faults between whole engines as well (tests/faults); none by default
#
# Exit codes: 0 passed; 77 no library, nothing was checked; otherwise cargo's.
set -uo pipefail
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}

skip() {
    echo "########################################################" >&2
    echo "## SKIPPED, NOTHING OF NIXL WAS CHECKED: $1" >&2
    echo "########################################################" >&2
    exit 77
}

if [ -z "${BATON_NIXL_LIBRARY:-}" ]; then
    [ "$(uname -s)" = Linux ] || skip "its wheels are for Linux"
    folder=${BATON_NIXL_FOLDER:-${TMPDIR:-/tmp}/baton-nixl}
    command -v python3 >/dev/null || skip "python3 is not installed"
    found() { find "$folder" -path '*mesonpy.libs/libnixl_capi.so' 2>/dev/null | head -n 1; }
    if [ -z "$(found)" ]; then
        python3 -m venv "$folder" || skip "python3 has no venv"
        # 1.5.1 is what was measured; its wheels are for x86-64 and aarch64.
        "$folder/bin/pip" -q install --no-deps 'nixl==1.5.1' 'nixl-cu12==1.5.1' || skip "PyPI cannot be reached"
    fi
    BATON_NIXL_LIBRARY=$(found)
    [ -n "$BATON_NIXL_LIBRARY" ] || skip "no libnixl_capi.so in $folder"
    export BATON_NIXL_LIBRARY
fi
echo "== NIXL: $BATON_NIXL_LIBRARY"

set -e
echo "== two agents and two processes, by what UCX has within a host"
"$cargo" test --workspace --test real -- --ignored --test-threads 2
echo "== the same by UCX's TCP, where a request hangs while its producer is stopped"
UCX_TLS=tcp "$cargo" test --workspace --test real -- --ignored --test-threads 2
echo "== exact mode, in process: tokens, log-probabilities and the bytes of every block"
"$cargo" test --workspace --test handoff by_nixl -- --ignored
echo "== whole engines, and stale reads"
"$cargo" test --workspace --test e2e nixl -- --ignored
if [ -n "${1:-}" ]; then
    echo "== $1 rounds of faults"
    "$cargo" test --workspace --test faults -- --rounds "$1"
fi
echo "== NIXL: everything held"
