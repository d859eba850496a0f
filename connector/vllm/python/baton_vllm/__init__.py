"""Baton's KV connector for vLLM: the handoff contract in unmodified vLLM engines.

vLLM loads the class by `kv_connector_module_path`:

    --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton_vllm",
                           "kv_role": "kv_both"}'
"""

__version__ = "0.1.0"
__all__ = ["BatonConnector", "NixlConnector"]


def __getattr__(name):
    # vLLM's rules for "NixlConnector" go by the class name. Both names are this connector.
    if name in __all__:
        from .connector import BatonConnector

        return BatonConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
