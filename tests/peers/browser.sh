#!/usr/bin/env bash
# The pages in a real browser (Debian: apt-get install chromium): the admin listener's /top of a `baton up` under load, and the
# committed report of `baton bench disconnect`, in light and dark, at the widths of a desktop and a phone; the report also in print.
#
#   tests/peers/browser.sh [--out DIR] [--report FILE] [BATON]
#
# --out keeps pictures and the printed report. BATON is target/release/baton, or target/debug/baton, by default; CHROMIUM another
# browser. Exit codes: 0 passed; 1 failed; 77 no browser, nothing was checked.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

skip() {
    echo "########################################################" >&2
    echo "## SKIPPED, NO PAGE WAS LOOKED AT: $1" >&2
    echo "########################################################" >&2
    exit 77
}

command -v python3 >/dev/null || skip "python3 is not installed"
browser=${CHROMIUM:-}
for candidate in chromium chromium-browser google-chrome; do
    [ -n "$browser" ] || browser=$(command -v "$candidate" || true)
done
[ -n "$browser" ] || skip "no chromium is installed (Debian: apt-get install chromium)"
command -v "$browser" >/dev/null || skip "there is no $browser"
if [ -z "${BATON_BIN:-}" ]; then
    for candidate in "$root/target/debug/baton" "$root/target/release/baton"; do
        [ ! -x "$candidate" ] || BATON_BIN=$candidate
    done
fi
echo "== $("$browser" --version 2>/dev/null | head -n 1)"
CHROMIUM=$browser BATON_BIN=${BATON_BIN:-} exec python3 "$root/tests/peers/browser.py" "$@"
