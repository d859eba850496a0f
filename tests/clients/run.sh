#!/usr/bin/env bash
# Clients of the field against Baton, one after the other. Prints SKIPPED for each whose packages are missing, and a line
# per client at the end. `--install` first puts the packages of all clients into target/clients. See README.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/clients
installed=$root/target/clients

if [ "${1:-}" = --install ]; then
    shift
    mkdir -p "$installed/node"
    # install FOLDER WHAT...: into an environment of its own.
    install() {
        local home=$installed/$1
        shift
        [ -x "$home/bin/pip" ] || python3 -m venv "$home"
        "$home/bin/pip" install --quiet --disable-pip-version-check "$@"
    }
    install python -r "$here/requirements.txt"
    install guidellm guidellm==0.8.1
    install aiperf aiperf==0.13.0
    if command -v npm >/dev/null 2>&1; then
        cp "$here/node/package.json" "$installed/node/"
        (cd "$installed/node" && npm install --silent --no-audit --no-fund)
    fi
fi

first() {
    local candidate
    for candidate in "$@"; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
}

python=$(first "${PYTHON:-}" "$installed/python/bin/python" "$root/.venv/bin/python" python3)
GUIDELLM=$(first "${GUIDELLM:-}" "$installed/guidellm/bin/guidellm" guidellm)
AIPERF=$(first "${AIPERF:-}" "$installed/aiperf/bin/aiperf" "$root/target/aiperf/bin/aiperf" aiperf)
modules=${NODE_MODULES:-$installed/node}
export GUIDELLM AIPERF
if [ -z "${BATON_BIN:-}" ]; then
    BATON_BIN=$(first "$root/target/release/baton" "$root/target/debug/baton")
    export BATON_BIN
fi

passed=() failed=() skipped=()

# run NAME REASON CONDITION... -- COMMAND...: runs the suite of a client, if its condition holds.
run() {
    local name=$1 reason=$2 condition=()
    shift 2
    while [ "$1" != -- ]; do
        condition+=("$1")
        shift
    done
    shift
    if ! "${condition[@]}" >/dev/null 2>&1; then
        echo "SKIPPED: the client \`$name\` was not run: $reason; tests/clients/run.sh --install"
        skipped+=("$name")
        return
    fi
    echo "== $name"
    if "$@"; then passed+=("$name"); else failed+=("$name"); fi
}

has() { [ -n "$python" ] && "$python" -c "import $1"; }
has_all() { local name; for name in "$@"; do has "$name" || return 1; done; }
node_has() { command -v node && [ -d "$modules/node_modules/$1" ] && [ -n "$python" ]; }

for client in openai anthropic litellm; do
    run $client "no Python with the package" has $client -- "$python" "$here/${client}_client.py" "$@"
done
run langchain "no Python with the packages" has_all langchain_openai langchain_anthropic -- \
    "$python" "$here/langchain_client.py" "$@"
run agents "no Python with the packages" has_all openai langchain langchain_openai -- \
    "$python" "$here/agents_client.py" "$@"
run openai-node "no Node with the package" node_has openai -- \
    "$python" "$here/node_client.py" openai --modules "$modules" "$@"
run ai-sdk "no Node with the packages" node_has ai -- "$python" "$here/node_client.py" ai --modules "$modules" "$@"
run guidellm "no command \`guidellm\`" test -n "$GUIDELLM" -- "$python" "$here/guidellm_client.py" "$@"
run aiperf "no command \`aiperf\`" test -n "$AIPERF" -- "$python" "$here/aiperf_client.py" "$@"

echo
for name in "${passed[@]}"; do echo "pass: $name"; done
for name in "${skipped[@]}"; do echo "SKIPPED: $name"; done
for name in "${failed[@]}"; do echo "FAILED: $name"; done
echo "clients: ${#passed[@]} passed, ${#failed[@]} failed, ${#skipped[@]} skipped"
[ ${#failed[@]} -eq 0 ]
