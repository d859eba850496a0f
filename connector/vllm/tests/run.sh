#!/bin/sh
# Runs the tests of baton-vllm. Installs nothing.
#
#   run.sh [--vllm-tests DIR] [arguments of pytest]
#
# PYTHON names the interpreter (python3). BATON_VLLM_CORE names the built library, else the tests of the core are
# skipped. Without vLLM, stubs take the place of its classes. --vllm-tests runs vLLM's own connector tests with this
# connector in the place of the NixlConnector: DIR is tests/v1/kv_connector/unit of vLLM's source, of the version that is
# installed.
#
# Exit codes: 0 passed; 77 no pytest or no vLLM, something was not checked; otherwise pytest's.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
vllm_tests=
if [ "${1:-}" = --vllm-tests ]; then
    [ $# -ge 2 ] || { echo "run.sh: --vllm-tests needs a folder" >&2; exit 2; }
    vllm_tests=$2
    shift 2
fi

if ! "$python" -c 'import pytest' 2>/dev/null; then
    echo "SKIPPED: $python has no pytest; nothing was checked"
    exit 77
fi
PYTHONPATH="$here/../python:$here${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
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
# shellcheck disable=SC2086
exec "$python" -m pytest -q -p no:cacheprovider -p vllm_registry $files "$@"
