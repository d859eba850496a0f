#!/usr/bin/env bash
# The official OpenAI client against Baton. Prints SKIPPED without Python or the package. See README.md.
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
if [ -z "$python" ] || ! "$python" -c 'import openai' >/dev/null 2>&1; then
    echo "SKIPPED: the OpenAI client was not run: no Python with the package \`openai\`;" \
        "python3 -m venv .venv && .venv/bin/pip install -r tests/clients/requirements.txt"
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
exec "$python" "$root/tests/clients/openai_client.py" "$@"
