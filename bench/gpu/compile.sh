#!/usr/bin/env bash
# Every CUDA kernel through NVIDIA's run-time compiler, for sm_80, sm_90a and sm_100a. No GPU, no driver, no toolkit: the
# compiler comes from PyPI (90 MB) into a folder of its own, unless BATON_CUDA_LIBRARIES names one that has it.
#
#   bench/gpu/compile.sh BATON
#
# Exit codes: 0 all compile and no hot kernel spills registers; 1 not so; 77 there is no compiler, nothing was checked.
set -uo pipefail

baton=${1:?usage: bench/gpu/compile.sh BATON}
skip() {
    echo "########################################################" >&2
    echo "## SKIPPED, NO KERNEL WAS COMPILED: $1" >&2
    echo "########################################################" >&2
    exit 77
}

if [ -z "${BATON_CUDA_LIBRARIES:-}" ]; then
    folder=${BATON_NVRTC_FOLDER:-${TMPDIR:-/tmp}/baton-nvrtc}
    command -v python3 >/dev/null || skip "python3 is not installed"
    if ! ls "$folder"/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.* >/dev/null 2>&1; then
        python3 -m venv "$folder" || skip "python3 has no venv"
        "$folder/bin/pip" -q install --no-deps 'nvidia-cuda-nvrtc==13.0.*' || skip "PyPI cannot be reached"
    fi
    BATON_CUDA_LIBRARIES=$(dirname "$(ls "$folder"/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.* | head -n 1)")
    export BATON_CUDA_LIBRARIES
fi
"$baton" bench gpu-compile
code=$?
[ "$code" = 77 ] && skip "no libnvrtc in $BATON_CUDA_LIBRARIES"
exit "$code"
