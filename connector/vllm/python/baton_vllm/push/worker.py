"""The worker's half: one rank's registrations, writes and notices, on vLLM's writer thread.

The engine's thread posts events, and takes results in `_get_new_notifs`. The writer thread owns both tables, submits
every write and sends every notice. A write and the notice that none comes therefore never cross.
"""

import collections
import concurrent.futures
import logging
import os
import queue
import time

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from . import consumer, messages, producer
from .probe import fingerprint, probe

logger = logging.getLogger("vllm.baton")

# Pauses of the writer thread: while blocks wait for a registration, as vLLM's; and otherwise.
LENT_POLL_S, IDLE_POLL_S = 0.001, 0.05
# How often the tables look at the clock, and how often counts are logged.
CLOCK_S, LOG_S = 0.25, 60.0

LEASE_OVER, NOT_SUBMITTED, WRITE_FAILED = "the lease has ended", "the write was not submitted", "the write failed"
ORPHANED, NOT_COVERED = "the engine process has ended", "this rank gets no blocks"


class PushWorker(NixlPushConnectorWorker):
    """vLLM's half with a writer loop of its own."""

    def __init__(self, vllm_config, engine_id, kv_cache_config, settings):
        super().__init__(vllm_config, engine_id, kv_cache_config)
        lease_s = vllm_config.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30)
        self._start_tables(settings.push_wait_s or float(lease_s), settings.push_silent_s)

    def _start_tables(self, wait_s, silent_s):
        self._registrations = producer.Registrations(wait_s)
        self._waits = consumer.Waits(silent_s)
        self._inbox = queue.Queue()  # to the writer: (function, arguments)
        self._results = queue.Queue()  # to the engine's thread: (function, arguments)
        # P's requests with a write in flight or in submission -> D's request id. Guarded by `_sending_transfers_lock`.
        self._writing = {}
        self._submitted = {}  # rank of D -> handle, of the write in submission
        self._fingerprints = collections.defaultdict(set)  # engine id -> agents of its handshakes
        self._parent = os.getppid()
        self._prober = None
        self._clock_at = self._log_at = 0.0
        self._logged = None

    # Start and end

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        payload = self.xfer_handshake_metadata
        if not payload.compatibility_hash.endswith(messages.HASH_SUFFIX):
            self.compat_hash += messages.HASH_SUFFIX
            payload.compatibility_hash += messages.HASH_SUFFIX

    def shutdown(self):
        if getattr(self, "_prober", None) is not None:
            self._prober.shutdown(wait=False)
            self._prober = None
        super().shutdown()

    # The engine's thread

    def start_load_kv(self, metadata):
        # The writer gets all events in one order, and blocks only after their lease is known here.
        registrations, lent = metadata.push_registrations, metadata.push_finished_blocks
        metadata.push_registrations, metadata.push_finished_blocks = {}, {}
        try:
            super().start_load_kv(metadata)
        finally:
            metadata.push_registrations, metadata.push_finished_blocks = registrations, lent
        for request_id, meta in metadata.reqs_to_recv.items():
            if request_id in registrations:
                continue
            if any(meta.local_block_ids):
                # vLLM's watchdog has dropped the registration before it was sent.
                self._failed_recv_reqs.put(request_id)
            else:
                # A refused request: no write comes, and vLLM's scheduler does not wait.
                self._recving_metadata.pop(request_id, None)
        orders = getattr(metadata, "baton_push", None) or messages.PushOrders()
        for request_id in orders.began:
            self._post(self._registrations.on_began, request_id)
        for request_id, blocks in lent.items():
            self._post(self._on_lent, request_id, blocks)
        for request_id in orders.ended:
            self._post(self._on_ended, request_id)
        for request_id, data in registrations.items():
            self._post(self._on_started, request_id, data)
        for request_id in orders.cancelled:
            self._post(self._on_cancelled, request_id)
        for request_ids, address in orders.withdrawn:
            self._post(self._on_withdrawn, request_ids, address)

    def get_transfer_results(self):
        results = super().get_transfer_results()
        while (request_id := take(self._evict_finished_inbox)) is not None:
            self._post(self._on_closed, request_id)
        return results

    def _get_new_notifs(self):
        """What the writer has found. Returns requests of P whose lease has ended early."""
        released = set()
        while (result := take(self._results)) is not None:
            function, argument = result
            function(argument, released)
        return released

    def _take_heartbeat(self, payload, _):
        self._handle_heartbeat(payload)

    def _take_landed(self, request_id, _):
        if request_id in self._recving_metadata:
            self._recving_transfers.setdefault(request_id, [])

    def _take_failed(self, request_id, _):
        self._failed_recv_reqs.put(request_id)

    def _take_gone(self, engine_id, _):
        """A producer that restarts with the same engine id gets a new handshake."""
        if engine_id in self._remote_agents:
            try:
                self._cleanup_remote_engine(engine_id)
            except Exception:
                logger.exception("Baton: the state of the ended producer %s is not removed", engine_id)

    def _take_released(self, request_id, released):
        with self._sending_transfers_lock:
            if request_id in self._reqs_to_send and request_id not in self._writing:
                del self._reqs_to_send[request_id]
                self._reqs_to_process.discard(request_id)
                released.add(request_id)

    def _reap_expired_send_leases(self, done_sending):
        """A lease does not end while its blocks are read."""
        with self._sending_transfers_lock:
            leases = self._reqs_to_send
            held = {request_id: leases.pop(request_id) for request_id in self._writing if request_id in leases}
            super()._reap_expired_send_leases(done_sending)
            leases.update(held)

    def _pop_done_transfers(self, transfers):
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is self._sending_transfers:
            for request_id in done:
                rid = self._writing.pop(request_id, None)
                if rid is not None and (request_id in failed or request_id in self._send_failures):
                    self._post(self._on_write_failed, rid, WRITE_FAILED)
        return done, failed

    def _post(self, function, *arguments):
        self._inbox.put((function, arguments))
        self._push_writer_wake.set()

    # The writer thread

    def _push_writer_loop(self):
        while not self._push_writer_stop.is_set():
            self._turn(time.perf_counter())
            self._push_writer_wake.wait(LENT_POLL_S if self._registrations.lent else IDLE_POLL_S)
            self._push_writer_wake.clear()

    def _turn(self, now):
        self._now = now
        while (event := take(self._inbox)) is not None:
            self._guarded(*event)
        self._guarded(self._read_notices, ())
        if now - self._clock_at >= CLOCK_S:
            self._clock_at = now
            self._guarded(self._on_time, ())

    def _guarded(self, function, arguments):
        """One event must not cost the others their turn."""
        try:
            function(*arguments)
        except Exception:
            logger.exception("Baton: %s of the push writer failed", getattr(function, "__name__", function))

    def _on_time(self):
        self._do(self._registrations.on_time(self._now))
        self._do(self._waits.on_time(self._now))
        counts = (dict(self._registrations.counts), dict(self._waits.counts))
        if self._now - self._log_at >= LOG_S and counts != self._logged:
            self._log_at = self._now
            if self._logged is not None:
                logger.info("Baton: registrations %s, waits %s", *counts)
            self._logged = counts

    def _on_lent(self, request_id, blocks):
        self._do(self._registrations.on_lent(request_id, blocks, self._now))

    def _on_ended(self, request_id):
        self._do(self._registrations.on_ended(request_id, self._now))

    def _on_closed(self, request_id):
        self._do(self._registrations.on_closed(request_id, self._now))

    def _on_write_failed(self, rid, reason):
        self._do(self._registrations.on_write_failed(rid, reason, self._now))

    def _on_started(self, request_id, data):
        self._waits.on_started(request_id, data, self._now)

        def reached():
            agents = [name_of(agent) for agent in self._agents_of(data["remote_engine_id"]).values()]
            self._do(self._waits.on_reached(request_id, data, agents, self._now))

        self._reach_producer(data, reached, lambda error: self._on_unreached(request_id, error))

    def _on_cancelled(self, request_id):
        self._do(self._waits.on_cancelled(request_id, self._now))

    def _on_withdrawn(self, request_ids, address):
        def reached():
            logger.info("Baton: request %s ended before it registered", request_ids[0])
            agents = self._agents_of(address["remote_engine_id"]).values()
            for request_id in request_ids:
                self._send(agents, messages.encode_withdraw(request_id), f"the withdrawal of {request_id}")

        self._reach_producer(address, reached, lambda error: logger.warning("Baton: no withdrawal: %s", error))

    def _on_unreached(self, request_id, error):
        logger.warning("Baton: the handshake for request %s failed: %s", request_id, error)
        self._do(self._waits.on_unreached(request_id))

    def _on_probed(self, engine_id, found, asked_at):
        actions = self._waits.on_probed(engine_id, found, asked_at, self._now)
        self._do(actions)
        if any(isinstance(action, consumer.Failed) for action in actions):
            self._results.put((self._take_gone, engine_id))

    # Notices

    def _read_notices(self):
        for agent, notices in self.nixl_wrapper.get_new_notifs().items():
            self._waits.on_heard(name_of(agent), self._now)
            for notice in notices:
                self._guarded(self._read_notice, (name_of(agent), notice))

    def _read_notice(self, agent, notice):
        if notice.startswith(PUSH_REG_NOTIF_PREFIX):
            try:
                data = msgspec.msgpack.decode(notice[len(PUSH_REG_NOTIF_PREFIX) :])
            except msgspec.DecodeError:
                data = None
            registration = messages.Registration.of(data)
            if registration is not None and "local_block_ids" in data:
                return self._do(self._registrations.on_registered(registration, self._now))
        elif notice.startswith(messages.CANCEL):
            registration = messages.decode_cancel(notice)
            if registration is not None:
                return self._do(self._registrations.on_cancelled(registration, self._now))
        elif notice.startswith(messages.WITHDRAW):
            if (request_id := messages.decode_withdraw(notice)) is not None:
                return self._do(self._registrations.on_withdrawn(request_id, self._now))
        elif notice.startswith(messages.NO_WRITE):
            answer = messages.decode_no_write(notice)
            if answer is not None:
                return self._do(self._waits.on_answer(agent, answer[0], False, answer[1], self._now))
        elif notice.startswith(b"HB:"):
            return self._results.put((self._take_heartbeat, notice[3:].decode(errors="replace")))
        elif notice.startswith(messages.HELD):
            return None
        elif (request_id := messages.decode_completion(notice)) is not None:
            return self._do(self._waits.on_answer(agent, request_id, True, None, self._now))
        logger.warning("Baton: a malformed notice of agent %s: %r", agent, notice[:80])
        return None

    def _send(self, agents, notice, what):
        for agent in agents:
            try:
                self.nixl_wrapper.send_notif(agent, notif_msg=notice)
            except Exception as error:
                # Registrations are repeated, and answered again.
                self.xfer_stats.record_failed_notification()
                logger.warning("Baton: %s did not reach agent %s: %s", what, agent, error)

    # Actions

    def _do(self, actions):
        for action in actions:
            self._guarded(self.ACTIONS[type(action)], (self, action))

    def _register(self, action):
        notice = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(action.data)
        self._send(self._agents_named(action), notice, f"the registration of {action.data['request_id']}")

    def _cancel(self, action):
        notice = messages.encode_cancel(action.data)
        self._send(self._agents_named(action), notice, f"the cancel of {action.data['request_id']}")

    def _agents_named(self, action):
        """The handles of agents that this rank is still connected with."""
        agents = self._agents_of(action.data["remote_engine_id"]).values()
        return [agent for agent in agents if name_of(agent) in action.agents]

    def _probe(self, action):
        data, asked_at = action.data, self._now
        engine_id = data["remote_engine_id"]
        one_rank = data["remote_tp_size"] == data["remote_pp_size"] == 1
        known = frozenset(self._fingerprints.get(engine_id, ())) if one_rank else frozenset()
        if self._prober is None:
            self._prober = concurrent.futures.ThreadPoolExecutor(1, "baton-push-probe")
        asked = self._prober.submit(probe, data["remote_host"], data["remote_port"], engine_id, known)

        def found(future):
            error = None if future.cancelled() else future.exception()
            if error is not None:
                logger.warning("Baton: the probe of producer %s failed: %s", engine_id, error)
            answer = consumer.SILENT if future.cancelled() or error is not None else future.result()
            self._post(self._on_probed, engine_id, answer, asked_at)

        asked.add_done_callback(found)

    def _landed(self, action):
        self._results.put((self._take_landed, action.request_id))

    def _failed(self, action):
        log = logger.info if action.reason == consumer.CANCELLED else logger.warning
        log("Baton: no write comes for request %s: %s", action.request_id, action.reason)
        self._results.put((self._take_failed, action.request_id))

    def _warn(self, action):
        where = f"{action.data['remote_host']}:{action.data['remote_port']}"
        logger.warning(
            "Baton: the producer at %s does not answer. It may still write: the blocks of %d requests stay.",
            where,
            action.waits,
        )

    def _refuse(self, action):
        registration = action.registration
        if not self._reach_consumer(registration, lambda: self._refuse(action), self._refusal_lost):
            return
        agents = self._agents_of(registration.engine_id).values()
        agents = [agent for agent in agents if action.agents is None or name_of(agent) in action.agents]
        logger.info("Baton: no write for the registration %s: %s", registration.request_id, action.reason)
        notice = messages.encode_no_write(registration.request_id, action.reason)
        self._send(agents, notice, f"the refusal of {registration.request_id}")

    def _refusal_lost(self, error):
        logger.warning("Baton: a decode engine is not reached, it gets no refusal until it asks again: %s", error)

    def _hold(self, action):
        registration = action.registration
        if self._reach_consumer(registration, lambda: self._hold(action), self._refusal_lost):
            agents = self._agents_of(registration.engine_id).values()
            self._send(agents, messages.HELD, f"the answer for {registration.request_id}")

    def _release(self, action):
        self._results.put((self._take_released, action.lender))

    # Writes

    def _write(self, action):
        """Submits a write, or refuses its registration."""
        rid = action.registration.request_id
        reason = self._reason_against(action)
        if reason is not None:
            return self._on_write_failed(rid, reason)
        try:
            reached = self._reach_consumer(
                action.registration,
                lambda: self._write(action),
                lambda error: self._on_write_failed(rid, f"no handshake: {error}"),
            )
        except Exception:
            self._on_write_failed(rid, NOT_SUBMITTED)
            raise
        if not reached:
            return None
        if not self._claim_lease(action):
            return self._on_write_failed(rid, LEASE_OVER)
        self._submitted = {}
        try:
            self._do_start_push_kv(action.lender, action.blocks, action.registration.data)
        except Exception:
            logger.exception("Baton: the write of %s failed in its submission", action.lender)
        return self._after_submission(action)

    def _reason_against(self, action):
        if not self._registrations.may_write(action.registration.request_id):
            return producer.CANCELLED
        # D takes the blocks of a producer whose engine process has ended.
        return ORPHANED if os.getppid() != self._parent else None

    def _claim_lease(self, action):
        with self._sending_transfers_lock:
            if action.lender not in self._reqs_to_send:
                return False
            self._writing[action.lender] = action.registration.request_id
            return True

    def _xfer_blocks(self, read_spec, **rest):
        handle = super()._xfer_blocks(read_spec=read_spec, **rest)
        if handle is not None:
            self._submitted[read_spec.remote_rank] = handle
        return handle

    def _after_submission(self, action):
        registration, lender = action.registration, action.lender
        with self._sending_transfers_lock:
            if self._submitted and lender in self._writing and lender not in self._sending_transfers:
                # A later rank's submission raised an error. The handles before it are in flight.
                self._sending_transfers[lender].extend(self._submitted.values())
            if not self._submitted:
                self._writing.pop(lender, None)
        if not self._submitted:
            return self._on_write_failed(registration.request_id, NOT_SUBMITTED)
        agents = self._agents_of(registration.engine_id).items()
        left_out = [name_of(agent) for (_, rank), agent in agents if rank not in self._submitted]
        actions = self._registrations.on_submitted(registration.request_id, NOT_COVERED, left_out)
        return self._do(actions)

    # Handshakes

    def _agents_of(self, engine_id):
        with self._handshake_lock:
            return dict(self._remote_agents.get(engine_id) or {})

    def _reach_producer(self, data, reached, failed):
        """Runs one of the functions on this thread, now or later."""
        try:
            future = self._ensure_handshake(
                data["remote_engine_id"],
                data["remote_host"],
                data["remote_port"],
                data["remote_tp_size"],
                pp_size=data["remote_pp_size"],
                notif_agents_only=True,
            )
        except Exception as error:
            return failed(error)
        return reached() if future is None else self._after(future, reached, failed)

    def _reach_consumer(self, registration, again, failed):
        """Whether D is connected. Otherwise one of the functions runs later, on this thread."""
        future = self._ensure_handshake(
            registration.engine_id, registration.host, registration.port, registration.tp_size
        )
        if future is None:
            return True
        self._after(future, again, failed)
        return False

    def _after(self, future, reached, failed):
        def done(f):
            error = concurrent.futures.CancelledError() if f.cancelled() else f.exception()
            if error is None:
                self._post(reached)
            else:
                self._post(failed, error)

        future.add_done_callback(done)

    def add_remote_agent(self, nixl_agent_meta, *arguments, **named):
        self._fingerprints[nixl_agent_meta.engine_id].add(fingerprint(nixl_agent_meta.agent_metadata))
        return super().add_remote_agent(nixl_agent_meta, *arguments, **named)

    def _add_notif_only_remote_agent(self, metadata, *arguments, **named):
        self._fingerprints[metadata.engine_id].add(fingerprint(metadata.agent_metadata))
        return super()._add_notif_only_remote_agent(metadata, *arguments, **named)

    def _cleanup_remote_engine(self, engine_id, **named):
        self._fingerprints.pop(engine_id, None)
        super()._cleanup_remote_engine(engine_id, **named)

    ACTIONS = {
        producer.Write: _write,
        producer.Refuse: _refuse,
        producer.Hold: _hold,
        producer.Release: _release,
        consumer.Register: _register,
        consumer.Cancel: _cancel,
        consumer.Probe: _probe,
        consumer.Landed: _landed,
        consumer.Failed: _failed,
        consumer.Warn: _warn,
    }


def take(inbox):
    """The next entry of a queue, or None."""
    try:
        return inbox.get_nowait()
    except queue.Empty:
        return None


def name_of(agent):
    """NIXL returns the names of agents as text or as bytes."""
    return agent.decode(errors="replace") if isinstance(agent, bytes) else str(agent)
