#!/usr/bin/env bash
# Rules and board with a real Prometheus (Debian: apt-get install prometheus): promtool reads the rules and runs their unit
# tests (tests/peers/alerts.yaml), then Prometheus scrapes a router, a prefill and a decode engine under load, evaluates every rule
# and is asked every query of every panel; at the end an engine is killed, and its alert fires.
#
#   tests/peers/prometheus.sh [BATON]      target/release/baton, or target/debug/baton, by default
#
# Exit codes: 0 everything held; 1 not so; 77 there is no Prometheus, nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() {
    echo "########################################################" >&2
    echo "## SKIPPED, NO RULE AND NO QUERY WAS EVALUATED: $1" >&2
    echo "########################################################" >&2
    exit 77
}

baton=${1:-target/release/baton}
[ -x "$baton" ] || baton=target/debug/baton
[ -x "$baton" ] || { echo "build first: cargo build --release" >&2; exit 1; }
for program in prometheus promtool python3; do
    command -v "$program" >/dev/null || skip "$program is not installed"
done

echo "== $(promtool --version 2>&1 | head -n 1)"
promtool check rules deploy/alerts/*.yaml
promtool test rules tests/peers/alerts.yaml
python3 tests/peers/prometheus.py "$baton"
