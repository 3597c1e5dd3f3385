# SPDX-License-Identifier: Apache-2.0
"""Order of a queue by which most requests are on time.

Moore and Hodgson's rule for one machine (Management Science, 1968): go through
the jobs by deadline; whenever one would be late, set aside the longest taken
so far. What is left, by deadline, is the largest set that can be on time. The
nodes of a pool stand for one machine as fast as all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Job:
    """A request that waits in the proxy.

    Attributes:
        key: Its name.
        arrival_ms: When it came.
        deadline_ms: When its prefill has to be done for its first token to be
            on time.
        work_ms: Time of a prefill node its prefill takes.
    """

    key: str
    arrival_ms: float
    deadline_ms: float
    work_ms: float


def on_time_order(
    jobs: Sequence[Job],
    now_ms: float,
    free_ms: float,
    speed: float,
    oldest_ms: float,
) -> tuple[list[Job], list[Job]]:
    """Jobs that can be on time, and those that cannot.

    Args:
        jobs: The queue, sorted by deadline.
        now_ms: The time.
        free_ms: Time until the machine is free.
        speed: Work it does in a millisecond, in milliseconds of a node.
        oldest_ms: A job older than this is hopeless no longer but first, so
            that none waits for ever.

    Returns:
        ``(in time, late)``: the former by deadline, the latter by arrival;
        jobs past `oldest_ms` stand before those in time.
    """
    overdue: list[Job] = []
    taken: list[tuple[float, int]] = []  # A heap by work, longest first.
    aside: set[int] = set()
    start = now_ms + free_ms
    total = 0.0
    for place, job in enumerate(jobs):
        if now_ms - job.arrival_ms > oldest_ms:
            overdue.append(job)
            aside.add(place)
            total += job.work_ms
            continue
        if start + job.work_ms > job.deadline_ms:
            # Late on its own. Those taken are all shorter, so that it would be
            # the first to be set aside.
            aside.add(place)
            continue
        heapq.heappush(taken, (-job.work_ms, place))
        total += job.work_ms
        # A single prefill runs on one node, however many there are.
        while taken and start + max(total / speed, job.work_ms) > job.deadline_ms:
            work, longest = heapq.heappop(taken)
            aside.add(longest)
            total += work
            if longest == place:
                break
    in_time = [job for place, job in enumerate(jobs) if place not in aside]
    gone = {job.key for job in overdue}
    late = [j for p, j in enumerate(jobs) if p in aside and j.key not in gone]
    return overdue + in_time, late
