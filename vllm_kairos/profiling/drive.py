# SPDX-License-Identifier: Apache-2.0
"""Run the cells of a plan on an engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from vllm_kairos.files import UserError
from vllm_kairos.profiling.client import EngineClient
from vllm_kairos.profiling.plan import Alone, Arrival, Bounds, Grid

#: Pause in which a batch takes a few decode-only steps.
_REST_S = 0.15
#: A request that takes this long has met an engine that hangs.
_HUNG_S = 300.0
#: Most tokens a decoding request of the grid may generate.
_MOST_OUTPUT_TOKENS = 16_384


async def run_alone(client: EngineClient, cell: Alone) -> None:
    """One prompt on an idle engine, whole or in chunks."""
    prompt = client.prompt(cell.prompt_tokens)
    await _in_time(client, client.generate(prompt, 1, chunks=cell.chunks))


async def run_grid(
    client: EngineClient,
    cell: Grid,
    prompts: Sequence[tuple[int, ...]],
    bounds: Bounds,
    in_time: Callable[[], bool],
) -> None:
    """Prompts in chunks beside a decode batch.

    Args:
        client: The engine.
        cell: Batch and context.
        prompts: Chunk schedule of each prompt, decodes counted in.
        bounds: What the engine allows.
        in_time: Whether there is time for another prompt.
    """
    async with decoding(client, cell.decodes, cell.context_tokens, bounds):
        await asyncio.sleep(_REST_S)
        for chunks in prompts:
            if not in_time():
                return
            prompt = client.prompt(sum(chunks) - len(chunks) * cell.decodes)
            await _in_time(client, client.generate(prompt, 1, chunks=chunks))
            await asyncio.sleep(_REST_S)


@contextlib.asynccontextmanager
async def decoding(
    client: EngineClient, decodes: int, context_tokens: int, bounds: Bounds
) -> AsyncIterator[None]:
    """`decodes` requests that decode for the length of a ``with`` block."""
    output = min(bounds.max_model_len - context_tokens - 1, _MOST_OUTPUT_TOKENS)
    events = [asyncio.Event() for _ in range(decodes)]
    tasks = [
        asyncio.create_task(
            client.generate(client.prompt(context_tokens), output, first_token=event)
        )
        for event in events
    ]
    ready = asyncio.gather(*(event.wait() for event in events))
    failed = asyncio.gather(*tasks)
    try:
        waits: set[asyncio.Future[Any]] = {ready, failed}
        done, _ = await asyncio.wait(
            waits, timeout=_HUNG_S, return_when=asyncio.FIRST_COMPLETED
        )
        if failed in done:
            failed.result()  # Raises what the engine said.
        if not done:
            raise _hung(client)
        yield
    finally:
        ready.cancel()
        for task in tasks:
            task.cancel()
        # Leaving closes the connections, at which the engine aborts them.
        await asyncio.gather(*tasks, failed, ready, return_exceptions=True)


async def run_replay(
    client: EngineClient, requests: Sequence[Arrival], duration_s: float
) -> None:
    """Open-loop arrivals; what is unfinished at the end is cancelled."""
    started = asyncio.get_running_loop().time()
    tasks: set[asyncio.Task[Any]] = set()
    try:
        for request in requests:
            due = started + request.at_s - asyncio.get_running_loop().time()
            if due > 0:
                await asyncio.sleep(due)
            chunks = []
            if request.chi:
                chunks = [request.chi] * -(-request.prompt_tokens // request.chi)
            task = asyncio.create_task(
                client.generate(
                    client.prompt(request.prompt_tokens),
                    request.output_tokens,
                    chunks=chunks,
                    # Streamed, as clients do: the engine's sender has work then.
                    first_token=asyncio.Event(),
                )
            )
            tasks.add(task)
            for ended in [task for task in tasks if task.done()]:
                tasks.discard(ended)
                ended.result()
        left = started + duration_s - asyncio.get_running_loop().time()
        if tasks and left > 0:
            await asyncio.wait(tasks, timeout=left)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, UserError):
            raise result


async def _in_time(
    client: EngineClient, request: Coroutine[Any, Any, dict[str, Any]]
) -> None:
    try:
        await asyncio.wait_for(request, _HUNG_S)
    except asyncio.TimeoutError:
        raise _hung(client) from None


def _hung(client: EngineClient) -> UserError:
    return UserError(
        f"engine {client.url}: no answer within {_HUNG_S:.0f} s, expected one"
    )
