# SPDX-License-Identifier: Apache-2.0
"""The queue of a policy that binds late."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_kairos.core.fleet import Request
from vllm_kairos.core.on_time import Job


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    Attributes:
        request: The request.
        due_ms: When its first token is due; the queue is sorted by it.
        job: What the order goes by; its work is zero until first looked at.
        late: It was set aside at the last look.
    """

    request: Request
    due_ms: float
    job: Job
    late: bool = False


def _due_ms(waiting: Waiting) -> float:
    return waiting.due_ms


class LateQueue:
    """Requests that wait, by when their first token is due."""

    def __init__(self) -> None:
        self._queue: list[Waiting] = []
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def late(self) -> int:
        """Requests that were set aside as late at the last look."""
        return sum(w.late for w in self._queue)

    def add(self, request: Request, due_ms: float) -> None:
        """Put a request in."""
        job = Job(request.request_id, request.arrival_ms, due_ms, 0.0)
        waiting = Waiting(request, due_ms, job)
        if not self._queue or self._queue[-1].due_ms <= due_ms:
            self._queue.append(waiting)
        else:
            bisect.insort(self._queue, waiting, key=_due_ms)
        self._due[request.request_id] = due_ms

    def remove(self, request_id: str) -> None:
        """Take a request out; one that is not there is ignored."""
        due_ms = self._due.pop(request_id, None)
        if due_ms is None:
            return
        queue = self._queue
        place = bisect.bisect_left(queue, due_ms, key=_due_ms)
        while queue[place].request.request_id != request_id:
            place += 1
        del queue[place]

    def front(self, most: int) -> list[Waiting]:
        """Those due first."""
        return self._queue[:most]

    def take(self, ids: Iterable[str], among: int) -> None:
        """Take requests out that are among the first `among`."""
        gone = set(ids)
        for request_id in gone:
            del self._due[request_id]
        self._queue[:among] = [
            w for w in self._queue[:among] if w.request.request_id not in gone
        ]

    def drain(self, most: int | None = None) -> list[Request]:
        """Take all out, or so many of those due first."""
        requests = [w.request for w in self._queue[:most]]
        del self._queue[: len(requests)]
        for request in requests:
            del self._due[request.request_id]
        return requests
