"""Registrations of one decode rank: which are answered, and which must be repeated, cancelled or given up.

Pure: no thread, no clock, no network. Each event returns the actions that the rank's writer thread carries out.

Invariants:
- A wait ends when each prefill rank that has the registration has written or refused, or when the producer has ended.
- It has landed only if each of them has written. Otherwise it has failed.
- A producer that does not answer at all may still write: its waits go on, unless a limit is set.
"""

import collections
import dataclasses

# A wait older than this makes the rank probe its producer, this often.
PROBE_AFTER_S, PROBE_EVERY_S = 3.0, 2.0
# A producer has ended if every probe finds no process for this time, and none of its ranks sends anything.
GONE_S = 4.0
# Registrations without an answer are repeated. Prefill ranks ignore repeated ones.
REPEAT_EVERY_S = 5.0

# What a probe finds at the producer's address: this process; none or another one; no answer.
ALIVE, GONE, SILENT = "alive", "gone", "silent"

PRODUCER_ENDED, PRODUCER_SILENT, UNREACHED = "the producer has ended", "the producer is silent", "no handshake"
CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class Register:
    """Send the registration to these agents of P."""

    data: dict
    agents: tuple


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Tell these agents of P that the write is no longer needed."""

    data: dict
    agents: tuple


@dataclasses.dataclass(frozen=True)
class Probe:
    """Ask at the producer's address which process is there."""

    data: dict


@dataclasses.dataclass(frozen=True)
class Landed:
    request_id: str


@dataclasses.dataclass(frozen=True)
class Failed:
    request_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Warn:
    """The producer does not answer, and so many requests wait for it."""

    data: dict
    waits: int


@dataclasses.dataclass
class Wait:
    data: dict  # vLLM's registration
    since: float
    agents: dict | None = None  # agent of P -> whether it wrote, None without an answer; None before the handshake
    sent_at: float = 0.0
    cancelled: bool = False
    reason: str | None = None

    @property
    def engine_id(self):
        return self.data["remote_engine_id"]

    def unanswered(self):
        return tuple(agent for agent, wrote in (self.agents or {}).items() if wrote is None)


@dataclasses.dataclass
class Producer:
    """What is known of one prefill engine."""

    probed_at: float = float("-inf")
    probing: bool = False
    gone_since: float | None = None
    silent_since: float | None = None
    heard_at: float = float("-inf")
    waits: dict = dataclasses.field(default_factory=dict)  # D's request ids, in order
    agents: set = dataclasses.field(default_factory=set)


class Waits:
    """See the module's documentation. `silent_s` is the limit for silent producers, 0 for none."""

    def __init__(self, silent_s=0.0):
        self.silent_s = silent_s
        self.waits = {}  # D's request id -> wait
        self.producers = {}  # engine id -> producer, while waits name it
        self.engine_of = {}  # agent of P -> its engine id
        self.counts = collections.Counter()

    # Requests of this engine

    def on_started(self, request_id, data, now):
        self.waits[request_id] = Wait(data, now)
        self.producers.setdefault(data["remote_engine_id"], Producer()).waits[request_id] = None

    def on_reached(self, request_id, data, agents, now):
        """The handshake with P is done."""
        wait = self.waits.get(request_id)
        if wait is None:
            return [Cancel(data, tuple(agents))] if agents else []
        if not agents:
            return self.on_unreached(request_id)
        wait.agents, wait.sent_at = dict.fromkeys(agents), now
        self.producers[wait.engine_id].agents.update(agents)
        self.engine_of.update(dict.fromkeys(agents, wait.engine_id))
        return [Register(data, tuple(agents))]

    def on_unreached(self, request_id):
        """P has no registration, because the handshake failed."""
        return [self._end(request_id, UNREACHED)] if request_id in self.waits else []

    def on_cancelled(self, request_id, now):
        """The request ended. Its blocks stay until P answers."""
        wait = self.waits.get(request_id)
        if wait is None:
            return []
        wait.cancelled = True
        if wait.agents is None:
            return [self._end(request_id, CANCELLED)]
        wait.sent_at = now
        return [Cancel(wait.data, wait.unanswered())]

    # Prefill ranks

    def on_answer(self, agent, request_id, wrote, reason, now):
        """A completed write, or the notice that none comes. Only the first answer of an agent counts."""
        wait = self.waits.get(request_id)
        if wait is None or (wait.agents or {}).get(agent, True) is not None:
            self.counts["late"] += 1
            return []
        wait.agents[agent] = wrote
        if not wrote:
            wait.reason = reason
        if wait.unanswered():
            return []
        return [self._end(request_id, wait.reason)]

    def on_heard(self, agent, now):
        """Anything that an agent sent shows that its process lives."""
        if (engine_id := self.engine_of.get(agent)) is not None:
            self.producers[engine_id].heard_at = now

    def on_probed(self, engine_id, found, asked_at, now):
        producer = self.producers.get(engine_id)
        if producer is None:
            return []
        producer.probing, producer.probed_at = False, now
        if found != SILENT:
            producer.silent_since = None
        if found != GONE:
            producer.gone_since = None
        if found == ALIVE:
            return []
        if found == SILENT:
            return self._silent(engine_id, producer, asked_at, now)
        if producer.gone_since is None or producer.heard_at > producer.gone_since:
            producer.gone_since = asked_at
            # A rank that lives answers the repeated registrations.
            return [self._repeat(wait, now) for _, wait in self._waits_of(engine_id) if wait.unanswered()]
        if now - producer.gone_since < GONE_S:
            return []
        return [self._end(rid, PRODUCER_ENDED) for rid, wait in self._waits_of(engine_id) if wait.agents is not None]

    def _silent(self, engine_id, producer, asked_at, now):
        waits = self._waits_of(engine_id)
        if producer.silent_since is None or producer.heard_at > producer.silent_since:
            producer.silent_since = asked_at
            return [Warn(waits[0][1].data, len(waits))] if waits else []
        if not self.silent_s or now - producer.silent_since < self.silent_s:
            return []
        return [self._end(rid, PRODUCER_SILENT) for rid, wait in waits if wait.agents is not None]

    def on_time(self, now):
        """Probes the producers of old waits, and repeats what has no answer."""
        actions = []
        for wait in self.waits.values():
            if wait.agents is None or now - wait.since < PROBE_AFTER_S:
                continue
            producer = self.producers[wait.engine_id]
            if not producer.probing and now - producer.probed_at >= PROBE_EVERY_S:
                producer.probing = True
                actions.append(Probe(wait.data))
            if now - wait.sent_at >= REPEAT_EVERY_S:
                actions.append(self._repeat(wait, now))
        return actions

    # Tables

    def _repeat(self, wait, now):
        wait.sent_at = now
        kind = Cancel if wait.cancelled else Register
        return kind(wait.data, wait.unanswered())

    def _waits_of(self, engine_id):
        return [(rid, self.waits[rid]) for rid in self.producers[engine_id].waits]

    def _end(self, request_id, reason):
        wait = self.waits.pop(request_id)
        producer = self.producers[wait.engine_id]
        del producer.waits[request_id]
        if not producer.waits:
            del self.producers[wait.engine_id]
            for agent in producer.agents:
                self.engine_of.pop(agent, None)
        self.counts[("failed", reason) if reason else "landed"] += 1
        return Failed(request_id, reason) if reason else Landed(request_id)
