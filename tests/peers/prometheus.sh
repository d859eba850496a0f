#!/usr/bin/env bash
# Rules and dashboard with a real Prometheus (Debian: apt-get install prometheus). promtool parses the rules and runs their unit
# tests (tests/peers/alerts.yaml). Prometheus scrapes a router, a prefill and a decode engine under load, evaluates every rule
# and every query of every panel. At the end an engine is killed, and its alert fires.
#
#   tests/peers/prometheus.sh [BATON]      target/release/baton, or target/debug/baton, by default
#
# Exit codes: 0 passed; 1 failed; 77 no Prometheus, nothing was checked.
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
