# SPDX-License-Identifier: Apache-2.0
"""What the proxy has dispatched and no state report shows yet.

A report is up to a heartbeat old, and an engine takes in new requests between
steps only, so for a while a dispatched request is in no report. It stays
counted here until a report shows its ticket, or it has finished.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kairos.core.messages import StateReport

#: An engine that does not name ordinary tickets in its reports is taken to
#: have a request in its report after this long.
UNNAMED_AFTER_S = 0.25


class Kind(enum.Enum):
    """What a dispatched request is to the node it was sent to."""

    PREFILL = "prefill"
    DEFLECTED = "deflected"
    AWAITING_KV = "awaiting_kv"
    #: Will decode here; another node is still prefilling it.
    EXPECTED = "expected"


@dataclass(slots=True)
class Entry:
    """One dispatch.

    Attributes:
        ticket: Its name.
        kind: What it is to the node.
        tokens: Prompt tokens.
        cached: Of those, what the node is believed to hold already.
        sent_s: When, on the proxy's monotonic clock.
        shown: A report stands for it now.
        answered_s: When its first byte came; reports show it as a decode then.
    """

    ticket: str
    kind: Kind
    tokens: int
    sent_s: float
    cached: int = 0
    shown: bool = False
    answered_s: float | None = None


class LinkLedger:
    """KV on its way over one node's link, as far as this proxy sent for it.

    A transfer is on the link from the dispatch of its decode leg to that leg's
    first byte, and all of them share the link's rate.

    Args:
        bytes_per_s: Rate of the link.
    """

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self._open: dict[str, float] = {}
        self._bytes = 0.0
        self._clear_s = 0.0

    def open(self, ticket: str, size_bytes: float, now_s: float) -> None:
        """A decode leg that fetches so much goes out."""
        self.close(ticket, now_s)
        self._open[ticket] = size_bytes
        self._bytes += size_bytes
        self._clear_s = max(now_s, self._clear_s) + size_bytes / self._bytes_per_s

    def close(self, ticket: str, now_s: float) -> None:
        """Its first byte is out, or it has failed. Unknown ones are ignored."""
        size = self._open.pop(ticket, None)
        if size is None:
            return
        self._bytes -= size
        if not self._open:
            self._bytes = 0.0
            self._clear_s = now_s

    def backlog_bytes(self, now_s: float) -> float:
        """Bytes that have yet to cross the link."""
        if not self._open:
            return 0.0
        left = (self._clear_s - now_s) * self._bytes_per_s
        return max(0.0, min(self._bytes, left))


class NodeLedger:
    """Dispatches to one node that have not finished.

    Attributes:
        version: Grows with every change, for caches.
    """

    def __init__(self) -> None:
        self.version = 0
        self._entries: dict[str, Entry] = {}
        self._incarnation: str | None = None
        self._last_report_s = 0.0
        self._names_ordinary = False
        #: Deflected prefills in the last report, and those of them that are
        #: known to be none by now.
        self._reported: set[str] = set()
        self._over: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def open(
        self, ticket: str, kind: Kind, tokens: int, now_s: float, cached: int = 0
    ) -> None:
        """Count a dispatch from now on."""
        self._entries[ticket] = Entry(ticket, kind, tokens, now_s, cached)
        self.version += 1

    def close(self, ticket: str) -> None:
        """It finished, failed or was cancelled. Unknown tickets are ignored."""
        if self._entries.pop(ticket, None) is not None:
            if ticket in self._reported:
                self._over.add(ticket)
            self.version += 1

    def shown(self, ticket: str) -> bool:
        """Whether a report stands for a dispatch, so that the engine has it."""
        entry = self._entries.get(ticket)
        return entry is not None and entry.shown

    def over(self, ticket: str) -> bool:
        """Whether a deflected prefill in the last report is one no more."""
        return ticket in self._over

    def unshown(self) -> Iterator[Entry]:
        """Dispatches that no report stands for, oldest first."""
        return (e for e in self._entries.values() if not e.shown)

    def observe(self, report: StateReport, received_s: float) -> None:
        """Reconcile with a report, which is newer than every one before."""
        restarted = self._incarnation not in (None, report.incarnation)
        if restarted:
            self._names_ordinary = False
        self._over.clear()
        self._reported = {d.ticket for d in report.deflected}
        names = self._reported.union(report.admitted)
        for entry in self._entries.values():
            if entry.shown or entry.kind is Kind.EXPECTED:
                continue
            if entry.ticket in names:
                entry.shown = True
                if entry.kind is not Kind.DEFLECTED and entry.answered_s is None:
                    self._names_ordinary = True
            elif entry.answered_s is not None:
                # Its name may have gone from the list that reports keep.
                entry.shown = received_s - entry.answered_s > UNNAMED_AFTER_S
            elif restarted and entry.sent_s < self._last_report_s:
                # It died with the process it was sent to.
                entry.shown = True
            elif (
                entry.kind is not Kind.DEFLECTED
                and not self._names_ordinary
                and received_s - entry.sent_s > UNNAMED_AFTER_S
            ):
                entry.shown = True
        self._incarnation = report.incarnation
        self._last_report_s = received_s
        self.version += 1

    def decoding(self, ticket: str, now_s: float) -> None:
        """Its first byte is out: what is left of it is a decode."""
        entry = self._entries.get(ticket)
        if entry is None:
            return
        if not entry.shown:
            entry.answered_s = now_s
            entry.kind = Kind.AWAITING_KV
            self.version += 1
        elif ticket in self._reported and ticket not in self._over:
            # The last report has it as a prefill; until the next it is counted
            # here, as what it is.
            self._over.add(ticket)
            entry.answered_s, entry.shown = now_s, False
            entry.kind = Kind.AWAITING_KV
            self.version += 1
