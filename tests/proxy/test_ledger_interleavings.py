# SPDX-License-Identifier: Apache-2.0
"""The ledger against everything that can happen to a message.

Two proxies over one engine; dispatches are admitted late or never, reports are
lost, repeated and delivered in any order, the engine restarts, clients leave.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from vllm_kairos.core.messages import MOST_ADMITTED, DeflectedReport, StateReport
from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.ledger import UNNAMED_AFTER_S, Kind

INTERLEAVINGS = 100_000
EVENTS = 14
TOKENS = 100
KINDS = (Kind.PREFILL, Kind.DEFLECTED, Kind.AWAITING_KV)


class Engine:
    """What an engine truly holds.

    Attributes:
        held: Phase by ticket.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.seq = 0
        self.held: dict[str, str] = {}
        self.admitted: deque[str] = deque(maxlen=MOST_ADMITTED)

    def admit(self, ticket: str, kind: Kind) -> None:
        self.held[ticket] = kind.value
        self.admitted.append(ticket)

    def restart(self) -> None:
        self.incarnation += 1
        self.seq = 0
        self.held.clear()
        self.admitted.clear()

    def report(self, now_s: float) -> tuple[StateReport, dict[str, str]]:
        """A report, and what it stands for."""
        self.seq += 1
        held = self.held
        awaiting = sum(p == "awaiting_kv" for p in held.values())
        made = StateReport(
            engine_id="e",
            incarnation=str(self.incarnation),
            seq=self.seq,
            time_s=now_s,
            role="kv_both",
            decodes=sum(p == "decode" for p in held.values()),
            decode_kv_tokens=0,
            deflected=[
                DeflectedReport(t, TOKENS, 0)
                for t, p in held.items()
                if p == "deflected"
            ],
            prefills=[(TOKENS, 0) for p in held.values() if p == "prefill"],
            more_prefill_tokens=0,
            awaiting_kv=awaiting,
            awaiting_kv_tokens=awaiting * TOKENS,
            free_kv_blocks=10,
            total_kv_blocks=10,
            block_size=16,
            budget_tokens=100,
            max_num_seqs=8,
            admitted=list(self.admitted),
            steps=[],
        )
        return made, dict(held)


class Proxy:
    """One proxy's node, its open dispatches and what is on its way to it."""

    def __init__(self) -> None:
        self.node = Node("n:1")
        self.open: dict[str, Kind] = {}
        self.channel: list[tuple[StateReport, dict[str, str]]] = []
        self.told: list[tuple[str, str]] = []
        self.shows: dict[str, str] = {}
        self.named: set[str] = set()
        self.sent_s: dict[str, float] = {}
        self.closed: set[str] = set()
        self.last = (0, 0)
        self.taken_s = 0.0

    def close(self, ticket: str) -> None:
        self.node.ledger.close(ticket)
        if self.open.pop(ticket, None) is not None:
            self.closed.add(ticket)

    def check(self, restarted: bool, now_s: float) -> None:
        """Every open dispatch is counted, none twice, nothing below zero."""
        ledger = self.node.ledger
        unshown = {e.ticket: e for e in ledger.unshown()}
        assert len(ledger) == len(self.open)
        assert unshown.keys() <= self.open.keys()
        for ticket, entry in unshown.items():
            if ticket in self.shows:
                # The report has it as a prefill; the proxy knows better.
                assert (
                    entry.answered_s is not None and self.shows[ticket] == "deflected"
                )
                assert ledger.over(ticket)
        for ticket in self.closed:
            assert self.shows.get(ticket) != "deflected" or ledger.over(ticket)
        if not restarted:
            # What no report names within that time is taken for named.
            recent = {t for t in self.open if now_s - self.sent_s[t] < UNNAMED_AFTER_S}
            assert recent - self.named - unshown.keys() == set()
        state = self.node.state(0.0, 1.0)
        shown = [p for t, p in self.shows.items() if not ledger.over(t)]
        kinds = [e.kind for e in unshown.values()]
        assert len(state.deflected) == (
            shown.count("deflected") + kinds.count(Kind.DEFLECTED)
        )
        assert len(state.prefills) == (
            shown.count("prefill") + kinds.count(Kind.PREFILL)
        )
        assert state.awaiting_kv == (
            shown.count("awaiting_kv") + kinds.count(Kind.AWAITING_KV)
        )
        assert state.expected == kinds.count(Kind.EXPECTED)
        assert state.expected_kv_tokens == TOKENS * state.expected
        assert min(state.free_kv_tokens, state.decodes) >= 0


class World:
    """One interleaving."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.engine = Engine()
        self.proxies = (Proxy(), Proxy())
        self.pending: list[tuple[str, Kind, Proxy]] = []
        self.owner: dict[str, Proxy] = {}
        self.now_s = 0.0
        self.tickets = 0
        self.restarted = False

    def dispatch(self) -> None:
        proxy = self.rng.choice(self.proxies)
        self.tickets += 1
        ticket = f"t{self.tickets}"
        expected = self.rng.random() < 0.15
        kind = Kind.EXPECTED if expected else self.rng.choice(KINDS)
        proxy.node.ledger.open(ticket, kind, TOKENS, self.now_s)
        proxy.open[ticket] = kind
        proxy.sent_s[ticket] = self.now_s
        if not expected:
            self.owner[ticket] = proxy
            self.pending.append((ticket, kind, proxy))

    def admit(self) -> None:
        if self.pending:
            place = self.rng.randrange(len(self.pending))
            ticket, kind, _ = self.pending.pop(place)
            self.engine.admit(ticket, kind)

    def progress(self) -> None:
        if not self.engine.held:
            return
        ticket = self.rng.choice(list(self.engine.held))
        phase, proxy = self.engine.held[ticket], self.owner[ticket]
        if phase == "deflected" or phase == "awaiting_kv":
            self.engine.held[ticket] = "decode"
            proxy.told.append(("first byte", ticket))
        else:
            del self.engine.held[ticket]
            proxy.told.append(("over", ticket))

    def report(self) -> None:
        made = self.engine.report(self.now_s)
        for proxy in self.proxies:
            for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
                proxy.channel.append(made)

    def deliver(self) -> None:
        proxy = self.rng.choice(self.proxies)
        if proxy.channel:
            place = self.rng.randrange(len(proxy.channel))
            made, shows = proxy.channel.pop(place)
            if proxy.node.observe(made, self.now_s):
                order = (int(made.incarnation), made.seq)
                # A process silent for seconds is given up for any other.
                assert order > proxy.last or self.now_s - proxy.taken_s >= 2.0
                proxy.last, proxy.taken_s = order, self.now_s
                proxy.shows = shows
                proxy.closed.clear()
                proxy.named.update(made.admitted)

    def restart(self) -> None:
        """Whatever it held or was about to take is broken off."""
        lost = [*self.engine.held, *(ticket for ticket, _, _ in self.pending)]
        for ticket in lost:
            self.owner[ticket].told.append(("over", ticket))
        self.pending.clear()
        self.engine.restart()
        self.restarted = True

    def abort(self) -> None:
        """A client leaves: at once at the proxy, later at the engine."""
        proxy = self.rng.choice(self.proxies)
        if proxy.open:
            proxy.close(self.rng.choice(list(proxy.open)))

    def notice(self) -> None:
        """The engine sees that a client has left."""
        for ticket in list(self.engine.held):
            if ticket not in self.owner[ticket].open:
                del self.engine.held[ticket]

    def tell(self) -> None:
        """A proxy hears what became of a dispatch."""
        proxy = self.rng.choice(self.proxies)
        if proxy.told:
            what, ticket = proxy.told.pop(0)
            if what == "over":
                proxy.close(ticket)
            else:
                proxy.node.ledger.decoding(ticket, self.now_s)

    def drain(self) -> None:
        """Everything comes to its end."""
        self.pending.clear()
        self.engine.held.clear()
        for proxy in self.proxies:
            for ticket in list(proxy.open):
                proxy.close(ticket)
        lost = self.rng.random() < 0.5
        made = self.engine.report(self.now_s)
        for proxy in self.proxies:
            # By itself the ledger counts nothing, whatever was reported.
            assert len(proxy.node.ledger) == 0
            assert not list(proxy.node.ledger.unshown())
            if lost:
                self.engine.seq += 3
                made = self.engine.report(self.now_s)
            if not proxy.node.observe(made[0], self.now_s):
                # It was taken for one replaced; not for long.
                self.now_s += 2.0
                assert proxy.node.observe(made[0], self.now_s)
            state = proxy.node.state(self.now_s, 1.0)
            assert not state.prefills and not state.deflected
            assert (state.decodes, state.awaiting_kv, state.expected) == (0, 0, 0)
            assert (state.awaiting_kv_tokens, state.expected_kv_tokens) == (0, 0)
            assert state.free_kv_tokens == 160


STEPS = (
    *[World.dispatch] * 4,
    *[World.admit] * 3,
    *[World.progress] * 3,
    *[World.report] * 3,
    *[World.deliver] * 5,
    *[World.tell] * 3,
    World.restart,
    World.abort,
    World.notice,
)


@pytest.mark.parametrize("part", range(4))
def test_nothing_is_counted_twice_and_nothing_outlives_its_request(part: int) -> None:
    rng = random.Random(part)
    for number in range(INTERLEAVINGS // 4):
        world = World(rng)
        for _ in range(EVENTS):
            world.now_s += 0.02
            rng.choice(STEPS)(world)
            if number % 10 == 0:
                for proxy in world.proxies:
                    proxy.check(world.restarted, world.now_s)
        for proxy in world.proxies:
            proxy.check(world.restarted, world.now_s)
        world.drain()


def test_a_long_life_leaves_nothing_either() -> None:
    rng = random.Random(99)
    for _ in range(5):
        world = World(rng)
        for _ in range(4000):
            world.now_s += 0.02
            rng.choice(STEPS)(world)
            for proxy in world.proxies:
                proxy.check(world.restarted, world.now_s)
        world.drain()
