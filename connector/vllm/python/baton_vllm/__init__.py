"""Baton's KV connectors for vLLM: the handoff contract in unmodified vLLM engines.

vLLM loads a class by `kv_connector_module_path`:

    --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton_vllm",
                           "kv_role": "kv_both"}'
"""

__version__ = "0.1.0"
__all__ = ["BatonConnector", "BatonPushConnector", "NixlConnector", "NixlPushConnector"]


def __getattr__(name):
    # vLLM's rules for "NixlConnector" and "NixlPushConnector" go by the class name.
    if name in ("BatonConnector", "NixlConnector"):
        from .connector import BatonConnector

        return BatonConnector
    if name in ("BatonPushConnector", "NixlPushConnector"):
        from .push.connector import BatonPushConnector

        return BatonPushConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
