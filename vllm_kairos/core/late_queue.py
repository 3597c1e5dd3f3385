# SPDX-License-Identifier: Apache-2.0
"""The queue of a policy that binds late."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import filterfalse, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm_kairos.core.fleet import Request
from vllm_kairos.core.on_time import Job

if TYPE_CHECKING:
    from vllm_kairos.core.prefill_pool import PrefillKind

#: Share of a look that is for requests which cannot be in time any more.
_HOPELESS_SHARE = 0.25
#: How far a look goes for requests that still can, in times its length.
_REACH = 8


@dataclass(slots=True)
class Waiting:
    """A request in the queue.

    Attributes:
        request: The request.
        due_ms: When its first token is due; the queue is sorted by it.
        job: What the order goes by; its work is zero until first looked at.
        late: It was set aside at the last look.
        hopeless: No prefill node could have it in time any more.
        fastest: The kind of prefill node by which `job` was worked out.
        costs: By kind of prefill node: time the prefill takes of it, and that
            with the KV transfer.
    """

    request: Request
    due_ms: float
    job: Job
    late: bool = False
    hopeless: bool = False
    fastest: PrefillKind | None = None
    costs: dict[PrefillKind, tuple[float, float]] = field(default_factory=dict)


_due_ms: Callable[[Waiting], float] = attrgetter("due_ms")
_hopeless: Callable[[Waiting], bool] = attrgetter("hopeless")


class LateQueue:
    """Requests that wait, by when their first token is due."""

    def __init__(self) -> None:
        self._queue: list[Waiting] = []
        self._due: dict[str, float] = {}
        #: Where `front` found what it gave last: from and to, in order.
        self._looked: list[tuple[int, int]] = []

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

    def front(self, most: int, now_ms: float) -> list[Waiting]:
        """Those to be looked at: due first, but not all of them hopeless.

        Under overload so many requests are past their due time that they alone
        would fill every look, and each request would be past its own when its
        turn comes. They get a share of a look, the oldest first, and what the
        others leave.

        Args:
            most: No more than so many.
            now_ms: The time: what was due before it is hopeless.

        Returns:
            Requests by when they are due.
        """
        queue = self._queue
        if len(queue) <= most:
            self._looked = [(0, len(queue))]
            return queue[:]
        past = bisect.bisect_left(queue, now_ms, key=_due_ms)
        share = int(most * _HOPELESS_SHARE)
        end = min(len(queue), past + _REACH * most)
        room = most - min(past, share)
        hopeful = list(islice(filterfalse(_hopeless, islice(queue, past, end)), room))
        if len(hopeful) == room:
            end = bisect.bisect_right(queue, hopeful[-1].due_ms, key=_due_ms)
        hopeless = queue[: min(past, most)]
        if past < share or len(hopeful) < room:
            hopeless += filter(_hopeless, queue[past:end])
        del hopeful[most - min(len(hopeless), share) :]
        del hopeless[most - len(hopeful) :]
        self._looked = [(0, min(past, most)), (past, end)]
        return sorted(hopeless + hopeful, key=_due_ms)

    def take(self, ids: Iterable[str]) -> None:
        """Take requests out that `front` gave last."""
        gone = set(ids)
        for request_id in gone:
            del self._due[request_id]
        for start, end in reversed(self._looked):
            self._queue[start:end] = [
                w for w in self._queue[start:end] if w.request.request_id not in gone
            ]
        self._looked = []

    def drain(self, most: int | None = None) -> list[Request]:
        """Take all out, or so many of those due first."""
        requests = [w.request for w in self._queue[:most]]
        del self._queue[: len(requests)]
        for request in requests:
            del self._due[request.request_id]
        return requests
