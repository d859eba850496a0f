"""Registrations at one prefill rank: which are written, and which get the notice that no write comes.

Pure: no thread, no clock, no network. Each event returns the actions that the rank's writer thread carries out.

```text
registered ─▶ pending ──lent──▶ claimed ──submitted──▶ written
                 │                 │ └────── write failed ──┐
                 └ ended, cancelled, waited too long ───────┴──▶ refused
```

Invariants:
- A registration is written or refused, never both. A refused registration is never written later.
- A pending registration whose request is live is not refused, except by its own cancel.
- Every table is bounded by number, or by the live requests of this engine.
"""

import collections
import dataclasses

from .messages import Recent, Registration, base_id

# Registrations without a request, beyond which a new one is refused.
PENDING_MAX = 65536
# Ended requests, cancelled ones, and answered registrations that are remembered, and for how long.
REMEMBERED_MAX, REMEMBERED_S = 65536, 600.0

CANCELLED, ENDED, UNKNOWN, FULL = "cancelled", "the request has ended", "no such request", "too many registrations"


@dataclasses.dataclass(frozen=True)
class Write:
    """Write these blocks of P's request into the registered ones."""

    lender: str
    blocks: object
    registration: Registration


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Send the notice that no write comes, to these agents of D or to all."""

    registration: Registration
    reason: str
    agents: tuple | None = None


@dataclasses.dataclass(frozen=True)
class Hold:
    """Send the notice that a write may still come."""

    registration: Registration


@dataclasses.dataclass(frozen=True)
class Release:
    """End the lease of P's request: no engine needs its blocks."""

    lender: str


@dataclasses.dataclass
class Claim:
    """A registration that has its blocks."""

    registration: Registration
    lender: str
    submitted: bool = False
    cancelled: bool = False
    refused: tuple | None = None  # (reason, agents) of those that this write does not cover


class Registrations:
    """See the module's documentation. A lender is a request of this engine whose blocks are lent."""

    def __init__(self, wait_s):
        self.wait_s = wait_s
        self.live = {}  # base id -> ids of requests that may lend
        self.lent = {}  # lender -> its blocks, while no registration has claimed them
        self.pending = {}  # D's request id -> (registration, since)
        self.claims = {}  # D's request id -> claim
        self.claimed_by = {}  # lender -> D's request id
        self._lenders = collections.defaultdict(list)  # base id -> keys of `lent`
        self._waiting = collections.defaultdict(list)  # base id -> keys of `pending`
        self.answered = Recent(REMEMBERED_MAX, REMEMBERED_S)  # D's request id -> (reason or None, agents)
        self.ended_bases = Recent(REMEMBERED_MAX, REMEMBERED_S)
        self.abandoned = Recent(REMEMBERED_MAX, REMEMBERED_S)  # base ids whose D has left
        self.counts = collections.Counter()

    # Requests of this engine

    def on_began(self, request_id):
        self.live.setdefault(base_id(request_id), set()).add(request_id)

    def on_ended(self, request_id, now):
        """The request ended and lends nothing."""
        return self._end(request_id, now)

    def on_lent(self, request_id, blocks, now):
        """The request ended, and its blocks wait for a registration."""
        base = base_id(request_id)
        self._forget_live(request_id)
        waiting = self._waiting.get(base)
        if waiting:
            registration = self._take_pending(request_id if request_id in waiting else waiting[0])
            return [self._claim(request_id, blocks, registration)]
        if self.abandoned.get(base, now):
            return [Release(request_id)]
        self.lent[request_id] = blocks
        self._lenders[base].append(request_id)
        return []

    def on_closed(self, lender, now):
        """The lease is over: written, released or expired."""
        rid = self.claimed_by.get(lender)
        if rid is not None and self.claims[rid].submitted:
            claim = self._unclaim(rid)
            self.answered.put(rid, claim.refused or (None, None), now)
        self._take_lent(lender)
        return self._end(lender, now)

    def _end(self, request_id, now):
        base = base_id(request_id)
        self._forget_live(request_id)
        if base in self.live:
            return []
        self.ended_bases.put(base, True, now)
        return [self._refuse(self._take_pending(rid), ENDED, now) for rid in list(self._waiting.get(base, ()))]

    # Registrations of decode engines

    def on_registered(self, registration, now):
        rid, base = registration.request_id, base_id(registration.request_id)
        if rid in self.claims or rid in self.pending:
            return [] if rid in self.claims and self.claims[rid].submitted else [Hold(registration)]
        if (answer := self.answered.get(rid, now)) is not None:
            return self._repeat(registration, answer)
        self.abandoned.pop(base)
        lenders = self._lenders.get(base)
        if lenders:
            lender = rid if rid in lenders else lenders[0]
            return [self._claim(lender, self._take_lent(lender), registration)]
        if base not in self.live and self.ended_bases.get(base, now):
            return [self._refuse(registration, ENDED, now)]
        if len(self.pending) >= PENDING_MAX:
            return [self._refuse(registration, FULL, now)]
        self.pending[rid] = (registration, now)
        self._waiting[base].append(rid)
        return []

    def on_cancelled(self, registration, now):
        rid = registration.request_id
        if rid in self.claims:
            self.claims[rid].cancelled = True
            return []
        if (answer := self.answered.get(rid, now)) is not None:
            return self._repeat(registration, answer)
        if rid in self.pending:
            self._take_pending(rid)
        return [self._refuse(registration, CANCELLED, now), *self.on_withdrawn(rid, now)]

    def on_withdrawn(self, request_id, now):
        """No decode engine needs the blocks of this request, unless another registration waits for them."""
        base = base_id(request_id)
        if self._waiting.get(base):
            return []
        self.abandoned.put(base, True, now)
        lenders = list(self._lenders.get(base, ()))
        for lender in lenders:
            self._take_lent(lender)
        return [Release(lender) for lender in lenders]

    def on_time(self, now):
        """Refuses registrations whose request has not come."""
        late = []
        for rid, (_, since) in self.pending.items():
            if since > now - self.wait_s:
                break
            if base_id(rid) not in self.live:
                late.append(rid)
        actions = [self._refuse(self._take_pending(rid), UNKNOWN, now) for rid in late]
        for rid in late:
            self.abandoned.put(base_id(rid), True, now)
        return actions

    # Results of `Write`

    def may_write(self, rid):
        """Whether the write of this claim may be submitted."""
        claim = self.claims.get(rid)
        return claim is not None and not claim.cancelled

    def on_submitted(self, rid, reason=None, agents=()):
        """The write is in flight. `agents` of D are not covered by it."""
        claim = self.claims[rid]
        claim.submitted = True
        self.counts["written"] += 1
        if not agents:
            return []
        claim.refused = (reason, tuple(agents))
        self.counts["refused", reason] += 1
        return [Refuse(claim.registration, *claim.refused)]

    def on_write_failed(self, rid, reason, now):
        """No part of the write is in flight any more, or none was submitted."""
        claim = self._unclaim(rid)
        if claim is None:
            return []
        reason = CANCELLED if claim.cancelled and not claim.submitted else reason
        return [self._refuse(claim.registration, reason, now), Release(claim.lender)]

    # Tables

    def _claim(self, lender, blocks, registration):
        self.claims[registration.request_id] = Claim(registration, lender)
        self.claimed_by[lender] = registration.request_id
        return Write(lender, blocks, registration)

    def _unclaim(self, rid):
        claim = self.claims.pop(rid, None)
        if claim is not None:
            del self.claimed_by[claim.lender]
        return claim

    def _refuse(self, registration, reason, now):
        self.answered.put(registration.request_id, (reason, None), now)
        self.counts["refused", reason] += 1
        return Refuse(registration, reason)

    def _repeat(self, registration, answer):
        reason, agents = answer
        return [] if reason is None else [Refuse(registration, reason, agents)]

    def _forget_live(self, request_id):
        base = base_id(request_id)
        if base in self.live:
            self.live[base].discard(request_id)
            if not self.live[base]:
                del self.live[base]

    def _take_lent(self, lender):
        remove(self._lenders, lender)
        return self.lent.pop(lender, None)

    def _take_pending(self, rid):
        remove(self._waiting, rid)
        return self.pending.pop(rid)[0]


def remove(index, request_id):
    """Removes an id from the list of its base id."""
    base = base_id(request_id)
    if request_id in index.get(base, ()):
        index[base].remove(request_id)
        if not index[base]:
            del index[base]
