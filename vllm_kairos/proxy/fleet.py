# SPDX-License-Identifier: Apache-2.0
"""The nodes: last report, ledger, health, and the `Fleet` a policy sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.messages import StateReport
from vllm_kairos.core.prefill import reported_work_ms, worked_off_ms
from vllm_kairos.core.profile import Profile
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.proxy.flags import ProxySettings
from vllm_kairos.proxy.ledger import Kind, LinkLedger, NodeLedger
from vllm_kairos.proxy.residency import Residency

_MOST_OLD_INCARNATIONS = 64
#: A process silent for so long has gone, whatever its successor's clock says.
_SILENT_S = 2.0


@dataclass(eq=False)
class Node:
    """One engine as the proxy knows it.

    Attributes:
        address: ``host:port`` of its HTTP server; its id in the fleet.
        profile: Its step-latency profile, if any.
        report: Last state report, if any.
        received_s: When it came, on the proxy's monotonic clock.
        ledger: What was dispatched to it and has not finished.
        up: False while it is believed dead.
        residency: Prefixes believed to be in its KV cache.
        link_ledger: KV on its way over its link, where the profile has one.
        counts_sent: Its state shows what was dispatched since the last report.
            Without, it is the report as it came, but for the deflected
            prefills in flight, of which the paper allows one (§5.3).
    """

    address: str
    profile: Profile | None = None
    report: StateReport | None = None
    received_s: float = float("-inf")
    ledger: NodeLedger = field(default_factory=NodeLedger)
    up: bool = True
    residency: Residency = field(default_factory=Residency)
    link_ledger: LinkLedger | None = None
    counts_sent: bool = True
    _model: StepModel | None = None
    _link: LinkModel | None = None
    _old_incarnations: list[str] = field(default_factory=list)
    _state: NodeState | None = None
    _version: int = -1
    _prefills: list[PrefillWork] = field(default_factory=list)
    _reported_ms: float = 0.0
    _sent_s: float | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            self._model = self.profile.step_model()
            self._link = self.profile.link_model()
        if self._link is not None:
            self.link_ledger = LinkLedger(self._link.bytes_per_s)

    @property
    def extrapolates(self) -> bool | None:
        """Whether its decode batch, as last reported, is outside its profile.

        `None` where it has no profile or no report came.
        """
        if self._model is None or self.report is None:
            return None
        told = self.report
        return bool(self._model.outside(told.decodes, told.decode_kv_tokens))

    def share_models(self, twin: Node) -> None:
        """Take the models of a node with the same profile.

        A policy plans once for nodes that are alike, and knows them by this.
        """
        self._model, self._link = twin._model, twin._link

    def fetching(self, ticket: str, tokens: int, now_s: float) -> None:
        """A decode leg that fetches the KV of so many tokens from here goes out."""
        if self.link_ledger is not None and self._link is not None:
            link = self._link
            size = tokens * link.kv_bytes_per_token * link.hops
            self.link_ledger.open(ticket, size, now_s)

    def fetched(self, ticket: str, now_s: float) -> None:
        """That leg has its first byte, or has failed."""
        if self.link_ledger is not None:
            self.link_ledger.close(ticket, now_s)

    def url(self, path: str) -> str:
        """URL of a path on it."""
        return f"http://{self.address}{path}"

    def observe(self, report: StateReport, now_s: float) -> bool:
        """Take in a report.

        Returns:
            False where it is older than one taken before: late, repeated, or
            of a process that has since been replaced.
        """
        last = self.report
        restarted = last is not None and report.incarnation != last.incarnation
        if last is not None and report.incarnation == last.incarnation:
            if report.seq <= last.seq:
                return False
        elif last is not None:
            # Another process: its successor, or one replaced long ago, maybe
            # before this proxy heard of it. The one known, once silent, has
            # gone, whatever the other's clock says.
            silent = now_s - self.received_s >= _SILENT_S
            if not silent and (
                report.incarnation in self._old_incarnations
                or report.time_s < last.time_s
            ):
                return False
            self._old_incarnations.append(last.incarnation)
            del self._old_incarnations[:-_MOST_OLD_INCARNATIONS]
        self.report = report
        self.received_s = now_s
        self._read(report)
        self.ledger.observe(report, now_s)
        self.residency.observe(report, restarted, now_s)
        return True

    def state(self, now_s: float, max_age_s: float) -> NodeState:
        """The node for a policy: the report plus what it does not show.

        Args:
            now_s: Monotonic clock.
            max_age_s: Age from which the report is stale.
        """
        state = self._state
        if state is None or self._version != self.ledger.version:
            self._version = self.ledger.version
            state = self._state = self._build()
        age_s = now_s - self.received_s
        state.fresh = age_s <= max_age_s
        if not self.counts_sent:
            return state
        report = self.report
        if report is not None:
            left_ms = report.step_remaining_ms - 1e3 * age_s
            state.step_in_flight_ms = left_ms if left_ms > 0.0 else 0.0
            sent_s = self._sent_s
            ago_ms = None if sent_s is None else 1e3 * (now_s - sent_s)
            state.worked_off_ms = worked_off_ms(-left_ms, self._reported_ms, ago_ms)
        if self.link_ledger is not None:
            state.link_backlog_bytes = self.link_ledger.backlog_bytes(now_s)
        return state

    def _read(self, report: StateReport) -> None:
        """Keep what a report says, in the terms of a state."""
        self._prefills = [
            PrefillWork(left, max(0, done))
            for left, done in report.prefills
            if left > 0
        ]
        if report.more_prefill_tokens > 0:
            self._prefills.append(PrefillWork(report.more_prefill_tokens))
        self._reported_ms = reported_work_ms(
            self._model,
            self._prefills,
            report.budget_tokens,
            report.decodes,
            any(d.tokens > 0 for d in report.deflected),
        )

    def _build(self) -> NodeState:
        state = NodeState(self.address, model=self._model, link=self._link)
        prefills = self._prefills.copy()
        deflected: list[PrefillWork] = []
        report = self.report
        if report is not None:
            state.budget_tokens = report.budget_tokens
            state.max_num_seqs = report.max_num_seqs
            # An engine that looks ahead may count a little below zero.
            state.decodes = max(0, report.decodes)
            state.decode_kv_tokens = max(0, report.decode_kv_tokens)
            state.awaiting_kv = max(0, report.awaiting_kv)
            state.awaiting_kv_tokens = max(0, report.awaiting_kv_tokens)
            state.free_kv_tokens = report.free_kv_blocks * report.block_size
            state.limit_ms = report.limit_ms
            state.adaptive = report.adaptive
            state.step_in_flight_ms = max(0.0, report.step_remaining_ms)
            deflected += [
                PrefillWork(d.tokens, max(0, d.computed))
                for d in report.deflected
                if d.tokens > 0 and not self.ledger.over(d.ticket)
            ]
        elif self.profile is not None and self.profile.engine is not None:
            state.budget_tokens = self.profile.engine.budget_tokens
            state.max_num_seqs = self.profile.engine.max_num_seqs
        self._sent_s = None
        for entry in self.ledger.unshown():
            if not self.counts_sent:
                if entry.kind is Kind.DEFLECTED:
                    deflected.append(PrefillWork(entry.tokens))
                continue
            if entry.kind is Kind.EXPECTED:
                state.expected += 1
                state.expected_kv_tokens += entry.tokens
                continue
            state.free_kv_tokens -= entry.tokens
            if entry.kind is Kind.AWAITING_KV:
                state.awaiting_kv += 1
                state.awaiting_kv_tokens += entry.tokens
                continue
            if self._sent_s is None:
                self._sent_s = entry.sent_s
            work = PrefillWork(entry.tokens - entry.cached, entry.cached)
            (prefills if entry.kind is Kind.PREFILL else deflected).append(work)
        state.free_kv_tokens = max(0, state.free_kv_tokens)
        state.prefills = prefills
        state.deflected = deflected
        return state


class ProxyFleet:
    """All nodes of the proxy.

    The lists of addresses are read anew when their length changes, since the
    bundled script appends to them (``/instances/add``).

    Args:
        settings: Addresses, profiles and the age from which state is stale.
    """

    def __init__(self, settings: ProxySettings):
        self._settings = settings
        self._max_age_s = settings.state_max_age_ms / 1e3
        self._counts_sent = settings.counts_sent
        self._nodes: dict[str, Node] = {}
        self._counts = (-1, -1)
        self.prefill: list[Node] = []
        self.decode: list[Node] = []
        self.sync()

    def sync(self) -> None:
        """Take in nodes that were added."""
        counts = (len(self._settings.prefill), len(self._settings.decode))
        if counts == self._counts:
            return
        self._counts = counts
        self.prefill = [self._node(a) for a in self._settings.prefill]
        self.decode = [self._node(a) for a in self._settings.decode]

    def _node(self, address: str) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = Node(
                address,
                self._settings.profiles.get(address),
                counts_sent=self._counts_sent,
            )
            for twin in self._nodes.values():
                if twin.profile is node.profile:
                    node.share_models(twin)
                    break
            self._nodes[address] = node
        return node

    def __getitem__(self, address: str) -> Node:
        return self._nodes[address]

    def cached(self, prefixes: Sequence[int], tokens: int) -> dict[str, int]:
        """Tokens of a prompt by node that are believed to be in its KV cache.

        Args:
            prefixes: `prefix_hashes` of the prompt.
            tokens: Its length.
        """
        found: dict[str, int] = {}
        if prefixes:
            for address, node in self._nodes.items():
                held = node.residency.cached_tokens(prefixes, tokens)
                if held:
                    found[address] = held
        return found

    def nodes(self) -> list[Node]:
        """Every node once."""
        self.sync()
        return list(dict.fromkeys([*self.prefill, *self.decode]))

    def view(self, now_s: float, exclude: frozenset[str] = frozenset()) -> Fleet:
        """The fleet for a policy: nodes believed alive.

        Args:
            now_s: Monotonic clock.
            exclude: Nodes left out whatever is believed of them.

        Returns:
            A fleet whose lists may be empty; the decode list holds the nodes
            believed dead where no other is left, since one of them may be
            back and there is nothing to lose.
        """
        self.sync()
        age = self._max_age_s
        prefill = [
            n.state(now_s, age)
            for n in self.prefill
            if n.up and n.address not in exclude
        ]
        decode = [n for n in self.decode if n.up and n.address not in exclude]
        if not decode:
            decode = [n for n in self.decode if n.address not in exclude]
        return Fleet(prefill, [n.state(now_s, age) for n in decode], now_s * 1e3)
