# SPDX-License-Identifier: Apache-2.0
"""What an engine is driven through while it is measured, and for how long.

The time budget is shared out among prompts alone, the grid and the replay.
One replay in three, of a short run one in two, is held out of the fit: the
profile is validated on it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np

from vllm_kairos.files import UserError
from vllm_kairos.profiling import plan
from vllm_kairos.profiling.client import EngineClient
from vllm_kairos.profiling.drive import run_alone, run_grid, run_replay
from vllm_kairos.profiling.progress import Progress
from vllm_kairos.profiling.session import LogTail, Session

if TYPE_CHECKING:
    from vllm_kairos.profiling.collect import Target

#: Times that prompts alone, the grid and the replay take turns: the most, the
#: least, and the seconds that are worth one.
_MOST_CYCLES, _LEAST_CYCLES, _CYCLE_S = 6, 2, 25.0
#: Shares of a cycle; the replay takes the rest.
_ALONE_SHARE = 0.15
_GRID_SHARE = 0.45
#: Grid and prompts alone are run at most this often.
_MOST_ROUNDS = 3
#: Segment of the replays that are held out of the fit.
HELD_OUT = "held-out"
_SHORTEST_REPLAY_S = 2.0
#: The engine writes its log every heartbeat; wait for at least two.
_FLUSH_S = 0.3
_FIRST_ROWS_S = 5.0


class Run:
    """One profiling run: cells one after the other until the time is up."""

    def __init__(
        self,
        target: Target,
        client: EngineClient,
        bounds: plan.Bounds,
        session: Session,
    ):
        self.target = target
        self.client = client
        self.bounds = bounds
        self.session = session
        self.progress: Progress | None = None
        self._tail = LogTail(target.step_log)
        self._prefill_tokens = 0.0
        self._prefill_ms = 0.0
        self._decode_ms: list[float] = []
        self._last = time.monotonic()
        self._before_s = session.spent_s
        self._started = self._last

    def _spent_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def _in_time(self, share: float) -> bool:
        return self._spent_s() < share * self.target.budget_s

    async def everything(self) -> None:
        """Prompts alone, the grid, the replay, in cycles.

        A machine that others use drifts: each kind of step is measured early
        and late, so that no coefficient stands for one moment only.
        """
        cycles = int(self.target.budget_s / _CYCLE_S)
        cycles = min(max(cycles, _LEAST_CYCLES), _MOST_CYCLES)
        for cycle in range(1, cycles + 1):
            start, end = (cycle - 1) / cycles, cycle / cycles
            alone_until = start + _ALONE_SHARE * (end - start)
            for number in range(1, _MOST_ROUNDS + 1):
                await self._alone(number, alone_until)
            grid_until = start + (_ALONE_SHARE + _GRID_SHARE) * (end - start)
            for number in range(1, _MOST_ROUNDS + 1):
                await self._grid(number, grid_until)
            await self._replay(cycle, end, last=cycle == cycles)

    async def _cell(
        self, name: str, segment: str, work: Callable[[], Awaitable[None]]
    ) -> None:
        if name in self.session.done:
            return
        if self.progress is not None:
            self.progress.say(name)
        await work()
        await asyncio.sleep(_FLUSH_S)
        rows = self._tail.new_rows()
        if not rows and not self.session.done:
            await asyncio.sleep(_FIRST_ROWS_S)
            rows = self._tail.new_rows()
            if not rows:
                raise UserError(
                    f"step log {self.target.step_log}: no step was added while the "
                    f"engine at {self.target.url} worked, expected its own step log"
                )
        for row in rows:
            self._learn(row)
        now = time.monotonic()
        self.session.finish_cell(name, segment, rows, now - self._last)
        self._last = now

    def _learn(self, row: dict[str, str]) -> None:
        """Rough speeds, to know what there is time for."""
        tokens = float(row["sum_prefill_tokens"])
        latency = float(row["latency_ms"])
        if tokens > 0:
            self._prefill_tokens += tokens
            self._prefill_ms += latency
        elif float(row["num_decode_requests"]) > 0:
            self._decode_ms.append(latency)

    @property
    def _tokens_per_s(self) -> float:
        if not self._prefill_ms:
            return 2000.0
        return 1e3 * self._prefill_tokens / self._prefill_ms

    async def _alone(self, number: int, until: float) -> None:
        for cell in plan.alone_cells(self.bounds):
            left = until * self.target.budget_s - self._spent_s()
            if left <= 0:
                return
            if cell.prompt_tokens > 0.5 * left * self._tokens_per_s:
                continue
            await self._cell(
                f"{cell.name}#{number}",
                "alone",
                functools.partial(run_alone, self.client, cell),
            )

    async def _grid(self, number: int, until: float) -> None:
        cells = plan.grid_cells(self.bounds)
        share_s = _GRID_SHARE * self.target.budget_s
        # A short budget is spent on a few cells rather than on one.
        each_s = share_s / min(len(cells), max(8.0, self.target.budget_s / 20.0))
        for cell in cells:
            left = until * self.target.budget_s - self._spent_s()
            tokens = min(each_s, left) * self._tokens_per_s
            if left <= 0:
                return
            if cell.setup_tokens > 0.6 * tokens:
                continue
            await self._cell(
                f"{cell.name}#{number}",
                "grid",
                functools.partial(
                    run_grid,
                    self.client,
                    cell,
                    cell.prompts(tokens),
                    self.bounds,
                    functools.partial(self._in_time, until),
                ),
            )

    async def _replay(self, cycle: int, until: float, last: bool) -> None:
        """Rounds of every load; the last of each three replays is held out."""
        end_s = until * self.target.budget_s
        left = end_s - self._spent_s()
        sessions = [
            (load, segment)
            for _ in range(max(1, round(left / 60.0)))
            for segment in ("replay", "replay", HELD_OUT)
            for load in plan.LOADS
        ]
        if left < 2.0 * _SHORTEST_REPLAY_S:
            # Early cycles are fitted, the last tests.
            sessions = [(plan.LOADS[1], HELD_OUT if last else "replay")]
        elif left < 2.0 * _SHORTEST_REPLAY_S * len(sessions):
            # Too short for all loads at once: one a cycle, the middle one first.
            load = plan.LOADS[cycle % len(plan.LOADS)]
            sessions = [(load, "replay"), (load, HELD_OUT)]
        prompt, output, full_rate = self._replay_shape()
        ran: set[str] = set()
        for i, (load, segment) in enumerate(sessions):
            duration = (end_s - self._spent_s()) / (len(sessions) - i)
            if duration < _SHORTEST_REPLAY_S:
                if segment in ran:
                    return
                # However short the time: a profile is never left untested.
                duration = _SHORTEST_REPLAY_S
            ran.add(segment)
            name = f"{segment}-{load:g}#{cycle}.{i}"
            requests = plan.arrivals(
                load * full_rate,
                duration,
                prompt,
                output,
                self.bounds,
                f"{self.target.seed}-{name}",
                self.target.lengths,
            )
            await self._cell(
                name,
                f"{segment}-{load:g}",
                functools.partial(run_replay, self.client, requests, duration),
            )

    def _replay_shape(self) -> tuple[int, int, float]:
        """Median prompt and output, and the rate the engine can just serve."""
        speed = self._tokens_per_s
        prompt = int(min(3569, max(64, 0.25 * speed), self.bounds.max_model_len / 8))
        output = 24
        decode_s = float(np.median(self._decode_ms)) / 1e3 if self._decode_ms else 0.02
        # Means of the lognormals, a batch of eight decoding together.
        mean_prompt, mean_output = 1.5 * prompt, 1.5 * output
        if self.target.lengths:
            mean_prompt, mean_output = np.mean(self.target.lengths, axis=0)
        seconds = mean_prompt / speed + mean_output * decode_s / 8.0
        return prompt, output, 1.0 / float(seconds)
