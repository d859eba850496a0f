#!/bin/sh
# Runs the tests of baton-vllm. Installs nothing.
#
#   run.sh [--vllm-tests DIR] [arguments of pytest]
#
# PYTHON names the interpreter (python3). BATON_VLLM_CORE names the built library, else the tests of the core are
# skipped. Without vLLM, stubs take the place of its classes.
#
# --vllm-tests runs vLLM's own connector tests three times: with its NixlConnector, then with this connector for handoffs
# of a stock producer, then for handoffs with the contract. Tests that vLLM itself does not pass here do not count. Those of
# vllm_differences.json must fail with this connector. DIR is tests/v1/kv_connector/unit of vLLM's source, of the version
# that is installed. The tests import `ray` and `tblib`. Model files are not downloaded.
#
# Exit codes: 0 passed; 77 no pytest or no vLLM, something was not checked; otherwise pytest's.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
vllm_tests=
if [ "${1:-}" = --vllm-tests ]; then
    [ $# -ge 2 ] || { echo "run.sh: --vllm-tests needs a folder" >&2; exit 2; }
    vllm_tests=$(cd "$2" && pwd)
    shift 2
fi

if ! "$python" -c 'import pytest' 2>/dev/null; then
    echo "SKIPPED: $python has no pytest; nothing was checked"
    exit 77
fi
PYTHONPATH="$here/../python:$here${PYTHONPATH:+:$PYTHONPATH}"
# Without the current folder, which may have a vLLM in it.
PYTHONSAFEPATH=1
export PYTHONPATH PYTHONSAFEPATH
has_vllm=1
[ "${BATON_TESTS_WITHOUT_VLLM:-}" != 1 ] && "$python" -c 'import vllm.version' 2>/dev/null || has_vllm=0

if [ -z "$vllm_tests" ]; then
    "$python" -m pytest -q -p no:cacheprovider "$here" "$@"
    if [ "$has_vllm" = 0 ]; then
        echo "SKIPPED: $python has no vLLM; the tests ran with stubs"
        exit 77
    fi
    # The stubs must agree with vLLM.
    BATON_TESTS_WITHOUT_VLLM=1 BATON_TEST_ORDERS=4 exec "$python" -m pytest -q -p no:cacheprovider "$here" "$@"
fi

if [ "$has_vllm" = 0 ]; then
    echo "SKIPPED: $python has no vLLM; its tests were not run"
    exit 77
fi
if [ ! -f "$vllm_tests/utils.py" ]; then
    echo "SKIPPED: $vllm_tests has no utils.py; it is not tests/v1/kv_connector/unit of vLLM's source"
    exit 77
fi
if ! "$python" -c 'import ray, tblib'; then
    echo "SKIPPED: $python has no ray or no tblib, which vLLM's tests import; its tests were not run"
    exit 77
fi
files=
for file in test_remote_decode_lifecycle test_remote_prefill_lifecycle test_nixl_heartbeat test_nixl_connector \
    test_nixl_connector_hma test_output_aggregator test_kv_load_failure_recovery test_invalid_blocks_correctness \
    test_cache_pollution_prevention test_error_propagation test_kv_connector_lifecycle; do
    if [ -f "$vllm_tests/$file.py" ]; then
        files="$files $vllm_tests/$file.py"
    else
        echo "SKIPPED: $vllm_tests has no $file.py"
    fi
done

# A cache of the model hub. Of the OPT models the tests read only the configuration. Qwen's place takes the demo model.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/opt"
cat >"$work/opt/config.json" <<'END'
{"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12,
 "num_hidden_layers": 12, "word_embed_proj_dim": 768, "max_position_embeddings": 2048, "vocab_size": 50272,
 "torch_dtype": "float16"}
END
cache() {
    mkdir -p "$work/hub/models--$1/refs" "$work/hub/models--$1/snapshots"
    printf main >"$work/hub/models--$1/refs/main"
    ln -s "$2" "$work/hub/models--$1/snapshots/main"
}
cache facebook--opt-125m "$work/opt"
cache facebook--opt-350m "$work/opt"
cache Qwen--Qwen3-0.6B "$here/../../../engine/models/demo"
HF_HUB_CACHE=$work/hub HF_HUB_OFFLINE=1
export HF_HUB_CACHE HF_HUB_OFFLINE

run() {
    echo "--- $1"
    shift
    # shellcheck disable=SC2086
    "$python" -m pytest -q -p no:cacheprovider -p vllm_registry --passed "$work/passed.json" $files "$@"
}
status=0
run "vLLM's NixlConnector" --connector stock "$@" || status=$?
[ "$status" -le 1 ] || exit "$status"
status=0
run "this connector, handoffs of a stock producer" --connector baton --handoffs stock "$@" || status=$?
run "this connector, handoffs with the contract" --connector baton --handoffs baton "$@" || status=$?
exit "$status"
