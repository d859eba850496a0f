#!/usr/bin/env bash
# Everything about the CUDA executor that needs a GPU, in one call, on a machine without a Rust toolchain.
#
#   bench/gpu/check.sh BATON [OUT]
#
# BATON is a built binary (`cargo build --release` makes target/release/baton); OUT is a folder for the results, by
# default bench/results/gpu. It needs libcuda (the driver), libnvrtc and libcublasLt; a folder with the last two can be named
# in BATON_CUDA_LIBRARIES. CONFORMANCE, HANDOFF and E2E may name the built test binaries of engine/tests/conformance.rs,
# engine/tests/handoff and tests/e2e (`cargo test -p baton-engine --test conformance --test handoff --no-run`,
# `cargo test --test e2e --no-run`): their tests of devices then run on the GPU. The last two look for the repository where
# they were built: link its path there.
#
# Device time is scarce: STEPS chooses what is done after the kernels, by default "parity pool speed ipc conformance pipelined nixl
# handoff e2e sanitizer disconnect", in this order; the last takes two minutes, all others together about seven. The step nixl needs NIXL's library (`pip install --no-deps nixl nixl-cu13`), which BATON_NIXL_LIBRARY may name.
#
# Every result says its date, commit, machine, driver and command. BATON_COMMIT names the commit where the repository is not beside
# the script.
#
# All that is said goes into OUT too, as DATE-gpu-check.txt: of parity, tests and sanitizer there is no other record. A second run of
# the day is added to it.
#
# DEVICE=software runs what can be run without a GPU: the script itself, the steps parity, pool, ipc, conformance, pipelined, nixl,
# handoff and e2e, and no speed. Nothing of it is kept in OUT.
#
# The last line is the verdict: "all right", "FAILED: …" or "NOT CHECKED: …" with every part that was not run and why (a test binary
# that is not named, a library or a tool that is not here, a step that STEPS or the software device leaves out).
#
# Exit codes: 0 every part was run and is right; 1 something is wrong; 2 wrong arguments; 3 what was run is right, and something
# was not run; 77 there is no GPU, nothing was checked.
set -uo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/../.."

case "${1:-}" in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$self"
        exit 0
        ;;
    '')
        echo "usage: bench/gpu/check.sh BATON [OUT]" >&2
        exit 2
        ;;
esac
baton=$1
out=${2:-bench/results/gpu}
conformance=${CONFORMANCE:-}
handoff=${HANDOFF:-}
e2e=${E2E:-}
device=${DEVICE:-cuda:0}
steps=" ${STEPS:-parity pool speed ipc conformance pipelined nixl handoff e2e sanitizer disconnect} "
for one in $steps; do
    case " parity pool speed ipc conformance pipelined nixl handoff e2e sanitizer disconnect " in
        *" $one "*) ;;
        *)
            echo "check.sh: STEPS has no step $one" >&2
            exit 2
            ;;
    esac
done
if ! [ -x "$baton" ]; then
    echo "check.sh: $baton cannot be run; build it first: cargo build --release" >&2
    exit 2
fi
if [ -z "${BATON_COMMIT:-}" ]; then
    BATON_COMMIT=$(git rev-parse --short HEAD 2>/dev/null || true)
    [ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || BATON_COMMIT=$BATON_COMMIT+
fi
export BATON_COMMIT
mkdir -p "$out"
# Once more, with everything that is said written down.
if [ -z "${BATON_GPU_CHECK_LOGGED:-}" ] && [ "$device" != software ]; then
    log="$out/$(date -u +%Y-%m-%d)-gpu-check.txt"
    kept=$(stat -c %s "$log" 2>/dev/null || echo 0)
    BATON_GPU_CHECK_LOGGED=1 "$self" "$@" 2>&1 | tee -a "$log"
    code=${PIPESTATUS[0]}
    # Where nothing was checked there is nothing to keep.
    if [ "$code" = 77 ]; then
        truncate -s "$kept" "$log"
        [ "$kept" != 0 ] || rm -f "$log"
    fi
    exit "$code"
fi
# The first version in the module's own page, as the results have it.
driver=$(grep -om1 '[0-9]\+\.[0-9.]\+' /proc/driver/nvidia/version 2>/dev/null | head -n 1 || true)
echo "check.sh $*: $(date -u +%Y-%m-%d), commit ${BATON_COMMIT:-unknown}, driver ${driver:-none}, device $device, steps$steps"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export BATON_KERNEL_CACHE=${BATON_KERNEL_CACHE:-$work/kernels}
failed=()
skipped=()

step() {
    echo
    echo "== $1"
}

# skip PART WHY
skip() {
    skipped+=("$1 ($2)")
    echo "## SKIPPED: $1: $2" >&2
}

# wanted STEP: whether it is to be run; one that is not is noted.
wanted() {
    case "$steps" in
        *" $1 "*) ;;
        *)
            skipped+=("$1 (not in STEPS)")
            return 1
            ;;
    esac
    case "$device $1" in
        "software speed" | "software sanitizer" | "software disconnect")
            skipped+=("$1 (not on the software device)")
            return 1
            ;;
    esac
}

# tests WHAT COMMAND…: runs test binaries' filters. A filter that matches no test has checked nothing.
tests() {
    local what=$1 code=0
    shift
    "$@" | tee "$work/tests.txt" || code=$?
    if [ "$code" != 0 ]; then
        failed+=("$what")
    elif ! grep -Eq '^test result: ok\. [1-9][0-9]* passed' "$work/tests.txt"; then
        failed+=("$what (no test was run)")
    fi
}

# The driver's own answer, not a tool's: nvidia-smi may be missing where the GPU is not.
code=0
if [ "$device" != software ]; then
    step "kernels against their twins"
    "$baton" bench gpu --check-only
    code=$?
else
    echo "## A DRY RUN ON THE SOFTWARE DEVICE: nothing of a GPU is checked or measured." >&2
    skipped+=("kernels (not on the software device)")
fi
if [ "$code" = 77 ]; then
    echo >&2
    echo "############################################################" >&2
    echo "## NO USABLE GPU. NOTHING WAS CHECKED, NOTHING WAS MEASURED." >&2
    echo "############################################################" >&2
    exit 77
fi
[ "$code" = 0 ] || failed+=("kernels")

if wanted parity; then
    step "parity with transformers: f32, and bf16 under the golden tokens"
    "$baton" parity engine/tests/fixtures --device "$device" || failed+=("parity")
fi

if wanted pool; then
    step "a KV pool that takes what the device has left, and an answer from it"
    # The software device has no default share, and an eighth of it is kept back.
    how=()
    [ "$device" = software ] && how=(--gpu-memory-utilization 0.15)
    # Its standard input ends with the coprocess, and the engine with that.
    coproc ENGINE { exec "$baton" engine --device "$device" --listen 127.0.0.1:0 --until-stdin-ends "${how[@]}" 2>"$work/pool.log"; }
    engine=$ENGINE_PID at=
    while read -r -t 300 line <&"${ENGINE[0]}"; do
        echo "$line"
        case "$line" in
            *"ready http="*)
                at=${line#*ready http=}
                at=${at%% *}
                break
                ;;
        esac
    done
    answer=
    if [ -n "$at" ] && exec 9<>"/dev/tcp/${at%:*}/${at##*:}"; then
        body='{"prompt": "a", "max_tokens": 4, "temperature": 0, "repetition_penalty": 1.05}'
        printf 'POST /v1/completions HTTP/1.1\r\nhost: check\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %s\r\n\r\n%s' \
            ${#body} "$body" >&9
        answer=$(timeout 60 cat <&9)
        exec 9>&-
    fi
    kill "$engine" 2>/dev/null
    wait "$engine" 2>/dev/null
    grep "KV cache sized from free device memory" "$work/pool.log" || failed+=("pool (nothing was chosen)")
    case "$answer" in
        "HTTP/1.1 200"*) ;;
        *)
            failed+=("pool (no answer)")
            cat "$work/pool.log"
            ;;
    esac
fi

if wanted speed; then
    step "speed"
    result="$out/$(date -u +%Y-%m-%d)-gpu.json"
    # What was measured is kept also when something else has failed: its report says what.
    "$baton" bench gpu --json >"$work/gpu.json" || failed+=("speed")
    if [ -s "$work/gpu.json" ]; then
        cp "$work/gpu.json" "$result"
        cat "$result"
        echo "written: $result"
    fi
fi

if wanted ipc; then
    tokens=8192
    [ "$device" = software ] && tokens=512
    step "device to device between two processes: $tokens tokens in the shape of Llama 3.1 8B"
    if "$baton" bench gpu-ipc --device "$device" --tokens "$tokens" --json >"$work/ipc.json"; then
        cat "$work/ipc.json"
        if [ "$device" != software ]; then
            cp "$work/ipc.json" "$out/$(date -u +%Y-%m-%d)-gpu-ipc.json"
        fi
    else
        failed+=("ipc")
    fi
fi

if wanted conformance; then
    step "every promise of a transport, between pools in device memory of two processes"
    if [ -n "$conformance" ]; then
        tests "conformance suite" env BATON_TEST_DEVICE="$device" "$conformance" --test-threads 4
    else
        skip conformance "CONFORMANCE does not name the built test binary of engine/tests/conformance.rs"
    fi
fi

if wanted pipelined; then
    step "what a handoff costs whose blocks are read while the prompt is computed"
    # One that costs more than it may is kept too: its report says how much. The software device's times say nothing.
    how=(--fail-on-miss)
    [ "$device" = software ] && how=(--tokens 96 --chunk 32 --repetitions 1)
    "$baton" bench handoff --device "$device" --transport auto,shm,tcp --json "${how[@]}" \
        >"$work/pipelined.json" || failed+=("pipelined")
    if [ -s "$work/pipelined.json" ]; then
        cat "$work/pipelined.json"
        if [ "$device" != software ]; then
            cp "$work/pipelined.json" "$out/$(date -u +%Y-%m-%d)-gpu-handoff.json"
        fi
    fi
    if [ "$device" != software ]; then
        echo "-- a model of 214 million parameters, weights made up"
        "$baton" bench engine --write-model "$work/made-up" --rounds 1 --decode-tokens 1 --exact-only >/dev/null \
            || failed+=("pipelined (the model cannot be made)")
        "$baton" bench handoff --device "$device" --transport auto,shm,tcp --json --fail-on-miss \
            --model "$work/made-up" --tokens 4096 --chunk 512 --pace-ms 1 \
            >"$work/pipelined-214m.json" || failed+=("pipelined, 214 million parameters")
        if [ -s "$work/pipelined-214m.json" ]; then
            sed "s|$work/made-up|DIR|g" "$work/pipelined-214m.json" | tee "$out/$(date -u +%Y-%m-%d)-gpu-handoff-214m.json"
        fi
        rm -rf "$work/made-up"
    fi
fi

if wanted nixl; then
    step "the same by NIXL, and broken off on the way: aborts, kill -9, SIGSTOP"
    tokens=8192
    [ "$device" = software ] && tokens=512
    "$baton" bench gpu-nixl --device "$device" --tokens "$tokens" --json >"$work/nixl.json"
    code=$?
    if [ -s "$work/nixl.json" ]; then
        cat "$work/nixl.json"
        if [ "$device" != software ]; then
            cp "$work/nixl.json" "$out/$(date -u +%Y-%m-%d)-gpu-nixl.json"
        fi
    fi
    if [ "$code" = 77 ]; then
        skip nixl "its library is not here, see above"
    elif [ "$code" != 0 ]; then
        failed+=("nixl")
    fi
fi

if wanted handoff; then
    step "handoffs, offload and transports with KV in device memory"
    if [ -n "$handoff" ]; then
        tests "handoff tests" env BATON_TEST_DEVICE="$device" "$handoff" device:: --test-threads 1
    else
        skip handoff "HANDOFF does not name the built test binary of engine/tests/handoff"
    fi
fi

if wanted e2e; then
    step "router and engines as processes, with KV in device memory"
    if [ -n "$e2e" ]; then
        for filter in device:: between_devices; do
            tests "end-to-end tests $filter" \
                env BATON_TEST_DEVICE="$device" BATON_TEST_BINARY="$(realpath "$baton")" "$e2e" "$filter" --test-threads 2
        done
    else
        skip e2e "E2E does not name the built test binary of tests/e2e"
    fi
fi

if wanted sanitizer; then
    step "compute-sanitizer"
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck synccheck; do
            echo "-- $tool"
            timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 "$baton" bench gpu --check-only \
                || failed+=("compute-sanitizer $tool")
        done
    else
        skip sanitizer "compute-sanitizer is not installed"
    fi
fi

if wanted disconnect; then
    step "clients that leave engines on this GPU"
    "$baton" bench disconnect --fail-on-findings --out "$work/disconnect" -- --device "$device" || failed+=("disconnect")
    if [ -s "$work/disconnect/summary.json" ]; then
        cp "$work/disconnect/summary.json" "$out/$(date -u +%Y-%m-%d)-gpu-disconnect.json"
    fi
fi

echo
if [ ${#failed[@]} -gt 0 ]; then
    [ ${#skipped[@]} = 0 ] || printf 'NOT CHECKED: %s\n' "${skipped[@]}" >&2
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
if [ ${#skipped[@]} -gt 0 ]; then
    echo "what was run is right" >&2
    list=$(printf '; %s' "${skipped[@]}")
    echo "NOT CHECKED: ${list:2}" >&2
    exit 3
fi
echo "all right"
