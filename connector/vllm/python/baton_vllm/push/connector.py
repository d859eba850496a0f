"""`BatonPushConnector`: vLLM's NixlPushConnector with halves of Baton's."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPushConnector
from vllm.logger import init_logger
from vllm.version import __version__ as VLLM_VERSION

from .. import seams
from ..connector import refuse_unsupported
from ..engine import Engine, is_child_of_multi_connector
from ..settings import PushSettings
from .scheduler import PushScheduler
from .worker import PushWorker

logger = init_logger("vllm.baton")


class BatonPushConnector(NixlPushConnector):
    """The hooks are vLLM's. Only the halves differ."""

    def __init__(self, vllm_config, role, kv_cache_config):
        settings = PushSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        refuse_unsupported(vllm_config, settings, is_child_of_multi_connector())
        if not vllm_config.kv_transfer_config.get_from_extra_config("enforce_handshake_compat", True):
            # A stock producer would write into freed blocks after a repeated registration.
            raise RuntimeError("baton-vllm does not support enforce_handshake_compat: false for push")
        seams.check(VLLM_VERSION, settings.allow_untested, seams.PUSH_FUNCTIONS)
        # Not NixlPushConnector's own constructor, which makes the stock halves.
        super(NixlPushConnector, self).__init__(vllm_config, role, kv_cache_config)
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            if (engine := Engine.find()) is not None:
                engine.rename_notices()
            self.connector_scheduler = PushScheduler(vllm_config, self.engine_id, kv_cache_config)
            logger.info("Baton: decode engines get a notice of each write that will not come")
        else:
            self.connector_worker = PushWorker(vllm_config, self.engine_id, kv_cache_config, settings)
