"""What this package uses of vLLM beyond its public connector interface, checked at start.

For each supported version, `seams.json` has each function's parameters and a hash of its syntax tree. A vLLM whose
functions differ is refused by name, before it serves a request.

    python -m baton_vllm.seams FOLDER...     prints the table for unpacked vLLM sources, for example site-packages
"""

import ast
import hashlib
import importlib.util
import json
import pathlib
import sys

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/"

# file -> functions whose behaviour the package relies on.
FUNCTIONS = {
    NIXL + "connector.py": [
        "NixlBaseConnector.get_num_new_matched_tokens",
        "NixlBaseConnector.update_state_after_alloc",
        "NixlBaseConnector.build_connector_meta",
        "NixlBaseConnector.on_new_request",
        "NixlBaseConnector.update_connector_output",
        "NixlBaseConnector.request_finished_all_groups",
        "NixlBaseConnector.set_xfer_handshake_metadata_pp_aware",
        "NixlBaseConnector.register_kv_caches",
        "NixlBaseConnector.get_transfer_results",
        "NixlBaseConnector.shutdown",
        "NixlPullConnector.__init__",
        "NixlPullConnector.start_load_kv",
    ],
    NIXL + "base_scheduler.py": [
        "NixlBaseConnectorScheduler.on_new_request",
        "NixlBaseConnectorScheduler._stop_heartbeat",
        "NixlBaseConnectorScheduler._get_remote_prefill_token_count",
        "NixlBaseConnectorScheduler.build_connector_meta",
        "NixlBaseConnectorScheduler.update_connector_output",
    ],
    NIXL + "pull_scheduler.py": [
        "NixlPullConnectorScheduler.get_num_new_matched_tokens",
        "NixlPullConnectorScheduler.update_state_after_alloc",
        "NixlPullConnectorScheduler.request_finished",
    ],
    NIXL + "pull_worker.py": [
        "NixlPullConnectorWorker.start_load_kv",
        "NixlPullConnectorWorker._read_blocks",
        "NixlPullConnectorWorker._get_new_notifs",
    ],
    NIXL + "base_worker.py": [
        "NixlBaseConnectorWorker.get_transfer_results",
        "NixlBaseConnectorWorker._reap_expired_send_leases",
        "NixlBaseConnectorWorker._handle_heartbeat",
    ],
    NIXL + "metadata.py": ["NixlConnectorMetadata.add_new_req_to_recv"],
    "vllm/distributed/kv_transfer/kv_connector/utils.py": ["KVOutputAggregator.aggregate"],
    "vllm/v1/core/sched/scheduler.py": [
        "Scheduler._update_from_kv_xfer_finished",
        "Scheduler._update_waiting_for_remote_kv",
        "Scheduler._handle_failed_recving",
        "Scheduler._connector_finished",
        "Scheduler._free_request",
        "Scheduler.finish_requests",
    ],
    "vllm/v1/engine/core.py": [
        "EngineCore._process_aborts_queue",
        "EngineCore.preprocess_add_request",
        "EngineCoreProc._process_input_queue",
        "EngineCoreProc._process_engine_step",
        "EngineCoreProc._handle_client_request",
        "EngineCoreProc._reject_add_in_shutdown",
        "EngineCoreProc._send_abort_outputs_to_client",
    ],
}

# The same for the push connector.
PUSH_FUNCTIONS = {
    NIXL + "connector.py": [
        "NixlBaseConnector.__init__",
        "NixlBaseConnector.build_connector_meta",
        "NixlBaseConnector.get_transfer_results",
        "NixlBaseConnector.on_new_request",
        "NixlBaseConnector.register_kv_caches",
        "NixlBaseConnector.request_finished_all_groups",
        "NixlBaseConnector.shutdown",
        "NixlBaseConnector.update_connector_output",
        "NixlBaseConnector.update_state_after_alloc",
        "NixlPushConnector.__init__",
        "NixlPushConnector.start_load_kv",
    ],
    NIXL + "base_scheduler.py": [
        "NixlBaseConnectorScheduler._nixl_handshake_listener",
        "NixlBaseConnectorScheduler.build_connector_meta",
        "NixlBaseConnectorScheduler.on_new_request",
        "NixlBaseConnectorScheduler.update_connector_output",
    ],
    NIXL + "push_scheduler.py": [
        "NixlPushConnectorScheduler.build_connector_meta",
        "NixlPushConnectorScheduler.get_num_new_matched_tokens",
        "NixlPushConnectorScheduler.has_pending_push_work",
        "NixlPushConnectorScheduler.request_finished",
        "NixlPushConnectorScheduler.update_connector_output",
        "NixlPushConnectorScheduler.update_state_after_alloc",
    ],
    NIXL + "push_worker.py": [
        "NixlPushConnectorWorker._do_send_reg_notif",
        "NixlPushConnectorWorker._do_start_push_kv",
        "NixlPushConnectorWorker._get_new_notifs",
        "NixlPushConnectorWorker._handle_push_reg_notif",
        "NixlPushConnectorWorker._pop_matching_finished_blocks",
        "NixlPushConnectorWorker._pop_matching_registration",
        "NixlPushConnectorWorker._push_writer_loop",
        "NixlPushConnectorWorker._send_registration_to_p",
        "NixlPushConnectorWorker._xfer_blocks",
        "NixlPushConnectorWorker._xfer_blocks_for_req",
        "NixlPushConnectorWorker.get_transfer_results",
        "NixlPushConnectorWorker.register_kv_caches",
        "NixlPushConnectorWorker.shutdown",
        "NixlPushConnectorWorker.start_load_kv",
    ],
    NIXL + "base_worker.py": [
        "NixlBaseConnectorWorker._add_notif_only_remote_agent",
        "NixlBaseConnectorWorker._cleanup_remote_engine",
        "NixlBaseConnectorWorker._ensure_handshake",
        "NixlBaseConnectorWorker._handle_failed_transfer",
        "NixlBaseConnectorWorker._handle_heartbeat",
        "NixlBaseConnectorWorker._nixl_handshake",
        "NixlBaseConnectorWorker._pop_done_transfers",
        "NixlBaseConnectorWorker._reap_expired_send_leases",
        "NixlBaseConnectorWorker.add_remote_agent",
        "NixlBaseConnectorWorker.get_transfer_results",
    ],
    NIXL + "metadata.py": ["NixlConnectorMetadata.__init__", "NixlConnectorMetadata.add_new_req_to_recv"],
    "vllm/distributed/kv_transfer/kv_connector/utils.py": [
        "KVOutputAggregator.aggregate",
        "TransferTopology.handshake_target_ranks",
    ],
    "vllm/v1/core/sched/scheduler.py": [
        "Scheduler._free_request",
        "Scheduler._handle_failed_recving",
        "Scheduler._update_from_kv_xfer_finished",
        "Scheduler._update_waiting_for_remote_kv",
        "Scheduler.finish_requests",
        "Scheduler.has_finished_requests",
        "Scheduler.has_requests",
    ],
}


def merged(*tables):
    """One table of files and functions, each function once."""
    files = dict.fromkeys(file for table in tables for file in table)
    return {file: list(dict.fromkeys(n for table in tables for n in table.get(file, ()))) for file in files}


ALL_FUNCTIONS = merged(FUNCTIONS, PUSH_FUNCTIONS)


class SeamsMoved(RuntimeError):
    """This vLLM is not one that the package was tested with."""


def read_function(tree, name):
    """The parameters and the hash of `Class.function` in a module's syntax tree; None if it is absent."""
    owner, _, wanted = name.rpartition(".")
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name == owner):
            continue
        for item in node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == wanted:
                arguments = item.args
                names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
                if ast.get_docstring(item) is not None:
                    item.body = item.body[1:] or [ast.Pass()]
                digest = hashlib.sha256(dump(item).encode()).hexdigest()[:16]
                return {"parameters": names, "hash": digest}
    return None


def dump(node):
    """A text of a syntax tree that is the same in every version of Python. `ast.dump` omits empty fields in some."""
    if isinstance(node, ast.AST):
        fields = [(key, dump(value)) for key, value in fields_of(node) if value not in (None, [])]
        return f"{type(node).__name__}({','.join(f'{key}={value}' for key, value in fields)})"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return repr(node)


def fields_of(node):
    """As `ast.iter_fields`. Python 3.12.0 and 3.12.1 end the nested format of an f-string with an empty text."""
    for key, value in ast.iter_fields(node):
        if isinstance(node, ast.JoinedStr) and key == "values":
            value = [item for item in value if not (isinstance(item, ast.Constant) and item.value == "")]
        yield key, value


def read_sources(folder, functions):
    """The table of one vLLM: function -> parameters and hash."""
    table = {}
    for file, names in functions.items():
        path = pathlib.Path(folder) / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        for name in names:
            table[name] = read_function(tree, name)
    return table


def known_versions():
    return json.loads(pathlib.Path(__file__).with_name("seams.json").read_text(encoding="utf-8"))


def minor(version):
    return ".".join(version.split(".")[:2])


def compare(version, table, allow_untested):
    """The reasons for which this vLLM is refused."""
    known = known_versions()
    expected = known.get(minor(version))
    if expected is None:
        if not allow_untested:
            return [f"version {version} is not one of {', '.join(known)}"]
        expected = known[max(known, key=lambda v: tuple(map(int, v.split("."))))]
    reasons = []
    for name, found in table.items():
        if found is None:
            reasons.append(f"{name} is gone")
        elif found["parameters"] != expected[name]["parameters"]:
            reasons.append(f"{name} has other parameters: {', '.join(found['parameters'])}")
        elif found["hash"] != expected[name]["hash"] and not allow_untested:
            reasons.append(f"{name} has changed")
    return reasons


def check(version, allow_untested, functions=FUNCTIONS):
    """Refuses a vLLM that differs from the tested ones in these functions."""
    root = pathlib.Path(importlib.util.find_spec("vllm").origin).parents[1]
    reasons = compare(version, read_sources(root, functions), allow_untested)
    if reasons:
        raise SeamsMoved(
            f"baton-vllm does not support this vLLM ({version}): {'; '.join(reasons)}. "
            "kv_connector_extra_config.baton.allow_untested admits changed functions, but no missing ones."
        )


if __name__ == "__main__":
    tables = {}
    for given in sys.argv[1:]:
        version = (pathlib.Path(given) / "vllm/_version.py").read_text().split("__version__ = version = '")[1]
        tables[minor(version)] = read_sources(given, ALL_FUNCTIONS)
    print(json.dumps(tables, indent=1))
