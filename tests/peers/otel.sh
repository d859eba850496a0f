#!/usr/bin/env bash
# Traces with collectors of other projects. rotel, a collector from PyPI, receives the traces of a router with
# deploy/otel/router.yaml: one request through both engines, and one cancelled request. Where OpenTelemetry's contrib collector
# is installed (otelcol-contrib; no package registry has it), it validates deploy/otel/collector.yaml.
#
#   tests/peers/otel.sh [BATON]      target/release/baton, or target/debug/baton, by default
#
# Exit codes: 0 passed; 1 failed; 77 no collector, nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() {
    echo "########################################################" >&2
    echo "## SKIPPED, $1" >&2
    echo "########################################################" >&2
}

baton=${1:-target/release/baton}
[ -x "$baton" ] || baton=target/debug/baton
[ -x "$baton" ] || { echo "build first: cargo build --release" >&2; exit 1; }

checked=0
if command -v otelcol-contrib >/dev/null; then
    echo "== $(otelcol-contrib --version)"
    OTLP_BACKEND=https://otlp.example.com otelcol-contrib validate --config deploy/otel/collector.yaml
    checked=1
else
    skip "THE COLLECTOR'S CONFIGURATION WAS NOT VALIDATED: otelcol-contrib is not installed"
fi

agent=${BATON_ROTEL:-}
if [ -z "$agent" ] && command -v python3 >/dev/null; then
    folder=${TMPDIR:-/tmp}/baton-rotel
    found() { find "$folder" -name rotel-agent -type f 2>/dev/null | head -n 1; }
    if [ -z "$(found)" ]; then
        # 0.0.1a15 is what was looked at; its wheels are for Python 3.10 to 3.13.
        python3 -m venv "$folder" && "$folder/bin/pip" -q install --no-deps 'rotel==0.0.1a15' || true
    fi
    agent=$(found)
fi
if [ -n "$agent" ]; then
    echo "== $("$agent" --version)"
    python3 tests/peers/otel.py "$baton" "$agent"
    checked=1
else
    skip "NO COLLECTOR TOOK A TRACE: rotel cannot be had from PyPI"
fi
[ "$checked" = 1 ] || exit 77
