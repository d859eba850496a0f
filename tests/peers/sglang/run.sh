#!/usr/bin/env bash
# SGLang's own routers in front of Baton's simulated SGLang engines: smg, sglang-router and its mini load balancer, with
# Baton's router beside them. The routers come from PyPI, into a folder outside of the repository; BATON_SGLANG_ROUTERS
# names another.
#
#   tests/peers/sglang/run.sh [BATON] [OPTIONS]     target/release/baton, or target/debug/baton, by default
#
# Exit codes: 0 passed; 1 failed; 77 no router of another project, only Baton's was checked.
set -euo pipefail
cd "$(dirname "$0")/../../.."

baton=target/release/baton
[ -x "$baton" ] || baton=target/debug/baton
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    baton=$1
    shift
fi
[ -x "$baton" ] || { echo "build first: cargo build --release" >&2; exit 1; }

folder=${BATON_SGLANG_ROUTERS:-${TMPDIR:-/tmp}/baton-sglang-routers}
# An environment each, because both packages have a command `smg`.
for package in smg==1.13.0 sglang-router==0.3.2; do
    home=$folder/${package%%==*}
    [ ! -x "$home/bin/smg" ] || continue
    python3 -m venv "$home" && "$home/bin/pip" -q install "$package" || rm -rf "$home"
done
missing=
for package in smg sglang-router; do
    [ -x "$folder/$package/bin/smg" ] || missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "########################################################" >&2
    echo "## SKIPPED, WITH THESE ROUTERS NOTHING WAS CHECKED:$missing: cannot be had from PyPI" >&2
    echo "########################################################" >&2
fi
python3 tests/peers/sglang/sglang.py "$baton" "$folder" "$@"
if [ ! -x "$folder/smg/bin/smg" ] && [ ! -x "$folder/sglang-router/bin/smg" ]; then
    exit 77
fi
