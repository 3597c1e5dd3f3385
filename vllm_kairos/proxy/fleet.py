# SPDX-License-Identifier: Apache-2.0
"""The nodes: last report, ledger, health, and the `Fleet` a policy sees."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.messages import StateReport
from vllm_kairos.core.profile import Profile
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.proxy.flags import ProxySettings
from vllm_kairos.proxy.ledger import Kind, NodeLedger

_MOST_OLD_INCARNATIONS = 64


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
    """

    address: str
    profile: Profile | None = None
    report: StateReport | None = None
    received_s: float = float("-inf")
    ledger: NodeLedger = field(default_factory=NodeLedger)
    up: bool = True
    _model: StepModel | None = None
    _link: LinkModel | None = None
    _old_incarnations: list[str] = field(default_factory=list)
    _state: NodeState | None = None
    _version: int = -1

    def __post_init__(self) -> None:
        if self.profile is not None:
            self._model = self.profile.step_model()
            self._link = self.profile.link_model()

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
        if last is not None:
            if report.incarnation == last.incarnation:
                if report.seq <= last.seq:
                    return False
            elif report.incarnation in self._old_incarnations:
                return False
            else:
                self._old_incarnations.append(last.incarnation)
                del self._old_incarnations[:-_MOST_OLD_INCARNATIONS]
        self.report = report
        self.received_s = now_s
        self.ledger.observe(report, now_s)
        return True

    def state(self, now_s: float, max_age_s: float) -> NodeState:
        """The node for a policy: the report plus what it does not show."""
        if self._state is None or self._version != self.ledger.version:
            self._version = self.ledger.version
            self._state = self._build()
        self._state.fresh = now_s - self.received_s <= max_age_s
        return self._state

    def _build(self) -> NodeState:
        state = NodeState(self.address, model=self._model, link=self._link)
        prefills: list[PrefillWork] = []
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
            prefills += [
                PrefillWork(left, max(0, done))
                for left, done in report.prefills
                if left > 0
            ]
            if report.more_prefill_tokens > 0:
                prefills.append(PrefillWork(report.more_prefill_tokens))
            deflected += [
                PrefillWork(d.tokens, max(0, d.computed))
                for d in report.deflected
                if d.tokens > 0
            ]
        elif self.profile is not None and self.profile.engine is not None:
            state.budget_tokens = self.profile.engine.budget_tokens
            state.max_num_seqs = self.profile.engine.max_num_seqs
        for entry in self.ledger.unshown():
            if entry.kind is Kind.EXPECTED:
                state.expected += 1
                state.expected_kv_tokens += entry.tokens
                continue
            state.free_kv_tokens -= entry.tokens
            if entry.kind is Kind.PREFILL:
                prefills.append(PrefillWork(entry.tokens))
            elif entry.kind is Kind.DEFLECTED:
                deflected.append(PrefillWork(entry.tokens))
            else:
                state.awaiting_kv += 1
                state.awaiting_kv_tokens += entry.tokens
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
            node = Node(address, self._settings.profiles.get(address))
            self._nodes[address] = node
        return node

    def __getitem__(self, address: str) -> Node:
        return self._nodes[address]

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
