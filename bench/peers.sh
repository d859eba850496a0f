#!/usr/bin/env bash
# Installs the routers that `baton bench router` and `baton bench compare` measure beside this one, from PyPI: each by itself, and
# what cannot be had is said on standard error.
#
#   bench/peers.sh [FOLDER]      default: target/bench-peers
#   baton bench router --peers FOLDER/bin
#   baton bench compare --peers FOLDER/bin
#
# nginx comes from the system: apt-get install nginx. PYTHON is another python3. Exit codes: 0 at least one is there; 77 none is.
set -euo pipefail
folder=${1:-target/bench-peers}
python=${PYTHON:-python3}
peers=("vllm-router==0.1.17" "smg==1.13.0")

skip() {
    echo "SKIPPED $1: $2" >&2
}

none() {
    for peer in "${peers[@]}"; do
        skip "${peer%%==*}" "$1"
    done
    exit 77
}

command -v "$python" >/dev/null || none "there is no $python"
if ! [ -x "$folder/bin/pip" ] && ! said=$("$python" -m venv "$folder" 2>&1); then
    none "$python makes no virtual environment in $folder (Debian: apt-get install python3-venv): $(tail -n 1 <<<"$said")"
fi
had=0
for peer in "${peers[@]}"; do
    if said=$("$folder/bin/pip" install --quiet --disable-pip-version-check "$peer" 2>&1); then
        had=$((had + 1))
    else
        why=$(grep -i error <<<"$said" | tail -n 1 || true)
        skip "${peer%%==*}" "pip cannot install $peer: ${why:-$said}"
    fi
done
[ "$had" -gt 0 ] || exit 77
echo "baton bench router --peers $folder/bin"
echo "baton bench compare --peers $folder/bin"
