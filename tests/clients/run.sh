#!/usr/bin/env bash
# The official OpenAI and Anthropic clients against Baton. Prints SKIPPED for each client whose Python or package is
# missing. See README.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in "$root/.venv/bin/python" python3; do
        if command -v "$candidate" >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
fi

if [ -z "${BATON_BIN:-}" ]; then
    for candidate in "$root/target/release/baton" "$root/target/debug/baton"; do
        if [ -x "$candidate" ]; then
            export BATON_BIN=$candidate
            break
        fi
    done
fi

status=0
for client in openai anthropic; do
    if [ -z "$python" ] || ! "$python" -c "import $client" >/dev/null 2>&1; then
        echo "SKIPPED: the client \`$client\` was not run: no Python with the package;" \
            "python3 -m venv .venv && .venv/bin/pip install -r tests/clients/requirements.txt"
        continue
    fi
    if "$python" "$root/tests/clients/${client}_client.py" "$@"; then
        echo "pass: $client"
    else
        echo "FAILED: $client"
        status=1
    fi
done
exit $status
