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
        sent_s: When, on the proxy's monotonic clock.
        shown: A report stands for it now.
    """

    ticket: str
    kind: Kind
    tokens: int
    sent_s: float
    shown: bool = False


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

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, ticket: str, kind: Kind, tokens: int, now_s: float) -> None:
        """Count a dispatch from now on."""
        self._entries[ticket] = Entry(ticket, kind, tokens, now_s)
        self.version += 1

    def close(self, ticket: str) -> None:
        """It finished, failed or was cancelled. Unknown tickets are ignored."""
        if self._entries.pop(ticket, None) is not None:
            self.version += 1

    def unshown(self) -> Iterator[Entry]:
        """Dispatches that no report stands for, oldest first."""
        return (e for e in self._entries.values() if not e.shown)

    def observe(self, report: StateReport, received_s: float) -> None:
        """Reconcile with a report, which is newer than every one before."""
        restarted = self._incarnation not in (None, report.incarnation)
        if restarted:
            self._names_ordinary = False
        names = {d.ticket for d in report.deflected}
        names.update(report.admitted)
        for entry in self._entries.values():
            if entry.shown or entry.kind is Kind.EXPECTED:
                continue
            if entry.ticket in names:
                entry.shown = True
                if entry.kind is not Kind.DEFLECTED:
                    self._names_ordinary = True
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

    def decoding(self, ticket: str) -> None:
        """Its first byte is out: what is left of it is a decode."""
        entry = self._entries.get(ticket)
        if entry is not None and not entry.shown:
            entry.kind = Kind.AWAITING_KV
            self.version += 1
