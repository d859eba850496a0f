#!/usr/bin/env bash
# Disconnects measured by another project: aiperf's sweep of --request-cancellation-rate through `baton up`. Prints SKIPPED
# without aiperf. See README.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
aiperf=${AIPERF:-}
if [ -z "$aiperf" ]; then
    folder=$root/target/aiperf
    aiperf=$folder/bin/aiperf
    if [ ! -x "$aiperf" ]; then
        python=${PYTHON:-python3}
        if ! { "$python" -m venv "$folder" && "$folder/bin/pip" install --quiet --disable-pip-version-check "aiperf==0.13.0"; }; then
            echo "SKIPPED: aiperf has judged nothing: it cannot be installed into $folder (needs Python 3.10 or later" \
                "and PyPI; or set AIPERF to the command)"
            exit 0
        fi
    fi
fi
if ! command -v "$aiperf" >/dev/null 2>&1; then
    echo "SKIPPED: aiperf has judged nothing: no command \`$aiperf\`"
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
export AIPERF=$aiperf
exec "${PYTHON:-python3}" "$root/tests/peers/aiperf_judge.py" "$@"
