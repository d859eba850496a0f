"""The worker's half of the connector: carries out the scheduler half's orders on one rank."""

import collections

from .handoff import HASH_SUFFIX, AnyPeerHash, WorkerOrders

# Ids that stock consumers have acknowledged, for which a later end of the lease must not report again.
ACKNOWLEDGED_MAX = 65536

# Ids of the heartbeats of one step.
BEATS_MAX = 65536


class WorkerReport:
    """vLLM's `KVConnectorWorkerMetadata`, by its one method."""

    def __init__(self, beats):
        self.beats = beats

    def aggregate(self, other):
        return WorkerReport(self.beats | other.beats)


class WorkerHalf:
    """See the module's documentation. `stock` is vLLM's own worker half."""

    def __init__(self, stock, strict_peers):
        self.stock = stock
        self.strict_peers = strict_peers
        self.orders = WorkerOrders()
        self.acknowledged = collections.OrderedDict()
        self.beats = set()
        self.watching = False

    def seal_handshake(self):
        """After `register_kv_caches`: peers without the contract fail the handshake's comparison."""
        stock = self.stock
        payload = stock.xfer_handshake_metadata
        if not self.strict_peers:
            # Stock decode engines compare the plain hash. This engine reads from both kinds of producers.
            stock.compat_hash = AnyPeerHash(stock.compat_hash)
            self.watch_heartbeats()
        elif not payload.compatibility_hash.endswith(HASH_SUFFIX):
            stock.compat_hash = stock.compat_hash + HASH_SUFFIX
            payload.compatibility_hash = payload.compatibility_hash + HASH_SUFFIX

    def watch_heartbeats(self):
        """Stock consumers renew by NIXL notifications, which reach the workers only."""
        if self.watching:
            return
        self.watching = True
        handle, beats = self.stock._handle_heartbeat, self.beats

        def observe(payload):
            beats.update(payload.split(",")[: BEATS_MAX - len(beats)])
            handle(payload)

        self.stock._handle_heartbeat = observe

    def take_report(self):
        """What the scheduler's half learns from this rank's step; None for nothing."""
        if not self.beats:
            return None
        beats = set(self.beats)
        self.beats.clear()
        return WorkerReport(beats)

    def accept(self, orders):
        """After `start_load_kv` of the stock half."""
        stock = self.stock
        for request_id in orders.ended:
            if request_id in self.acknowledged:
                continue
            stock._reqs_to_send.pop(request_id, None)
            stock._reqs_to_process.discard(request_id)
            stock.consumer_notification_counts_by_req.pop(request_id, None)
            stock.expected_consumer_notifications_by_req.pop(request_id, None)
            self.orders.ended.append(request_id)
        self.orders.ended.extend(orders.again)
        self.orders.landed.extend(orders.landed)
        self.orders.failed.extend(orders.failed)

    def report(self, results):
        """After `get_transfer_results` of the stock half: adds what the orders decided."""
        for request_id in results.finished_sending:
            self.acknowledged[request_id] = None
            if len(self.acknowledged) > ACKNOWLEDGED_MAX:
                self.acknowledged.popitem(last=False)
        orders, self.orders = self.orders, WorkerOrders()
        results.finished_sending.update(orders.ended)
        results.finished_recving.update(orders.landed)
        results.finished_recving.update(orders.failed)
        results.failed_recving.update(orders.failed)
        return results
