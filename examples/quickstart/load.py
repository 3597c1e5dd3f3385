# SPDX-License-Identifier: Apache-2.0
"""An open-loop load generator that notes when every token came."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from vllm_kairos.sim.traces import TraceRow

#: No request of the quick start takes this long unless something hangs.
REQUEST_TIMEOUT_S = 180.0


@dataclass
class Record:
    """What happened to one request.

    Attributes:
        policy: Arm.
        repetition: Of the arm, from 0.
        index: Of the request in the arrivals.
        due_s: When it was due, from the start of the run.
        late_ms: How much later the generator sent it.
        prompt_tokens: Prompt length.
        wanted_tokens: Output length asked for.
        status: HTTP status, 0 where there was none.
        route: The path the proxy says it took.
        error: What went wrong, empty where nothing did.
        token_s: When each output token came, from the time it was due.
        tokens: Output token ids.
    """

    policy: str
    repetition: int
    index: int
    due_s: float
    prompt_tokens: int
    wanted_tokens: int
    late_ms: float = 0.0
    status: int = 0
    route: str = ""
    error: str = ""
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it did not come back whole."""
        return bool(self.error)

    @property
    def deflected(self) -> bool:
        """Whether its decode node did its prefill."""
        return self.route == "deflected"

    @property
    def ttft_ms(self) -> float:
        """Time from when it was due to its first token."""
        return 1e3 * self.token_s[0]

    @property
    def tbt_ms(self) -> list[float]:
        """Times between its tokens, one fewer than there are tokens."""
        return [1e3 * float(gap) for gap in np.diff(self.token_s)]


class Prompts:
    """Prompts of random tokens that no other arm has sent.

    Args:
        model: Folder of the model; its ordinary tokens are drawn from.
        seed: Of the draws.
    """

    def __init__(self, model: Path, seed: int):
        size, special = _vocabulary(model)
        self._ids = np.array([i for i in range(size) if i not in special])
        self._rng = np.random.default_rng(seed)

    def draw(self, tokens: int) -> list[int]:
        """A new prompt of that length."""
        return [int(i) for i in self._rng.choice(self._ids, size=tokens)]


def _vocabulary(model: Path) -> tuple[int, set[int]]:
    """Tokens of a model but for those added, and those that are special."""
    file = model / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer  # type: ignore[import-untyped]

        fast = Tokenizer.from_file(str(file))
        added = fast.get_added_tokens_decoder().items()
        special = {number for number, token in added if token.special}
        return fast.get_vocab_size(with_added_tokens=False), special
    # Imports PyTorch, which takes long to load, and as long to let go of when
    # somebody has pressed Ctrl-C.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    size = min(len(tokenizer), tokenizer.vocab_size)
    return size, set(tokenizer.all_special_ids)


async def send_one(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    record: Record,
    due: float,
) -> None:
    """Send one streamed completion and fill its record.

    Args:
        session: Client.
        url: Base URL of a proxy or an engine.
        model: Served model name.
        prompt: Token ids.
        record: To be filled.
        due: When it was due, on `time.perf_counter`'s clock.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": record.wanted_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        # A chunk's text may hold no or several tokens; its ids are exact.
        "return_token_ids": True,
    }
    record.late_ms = 1e3 * (time.perf_counter() - due)
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            record.status = answer.status
            record.route = answer.headers.get("x-kairos-route", "")
            if answer.status != 200:
                text = (await answer.text())[:200]
                record.error = f"HTTP {answer.status}: {text}"
                return
            async for line in answer.content:
                now = time.perf_counter() - due
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    record.error = str(event["error"])[:200]
                    return
                for choice in event["choices"]:
                    ids = choice.get("token_ids") or []
                    record.tokens += ids
                    record.token_s += [now] * len(ids)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
        return
    if len(record.tokens) != record.wanted_tokens:
        record.error = f"{len(record.tokens)} of {record.wanted_tokens} tokens came"


class Occupied:
    """Keeps prefill engines at work for as long as it is entered.

    A profile measured while the other engines idle promises step times that
    nobody sees once all of them share caches, memory bandwidth and cores.

    Args:
        urls: Base URLs of the engines.
        model: Served model name.
        prompts: Where prompts come from.
        tokens: Length of each.
    """

    def __init__(self, urls: Sequence[str], model: str, prompts: Prompts, tokens: int):
        self._urls = urls
        self._model = model
        self._prompts = prompts
        self._tokens = tokens
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *what: object) -> None:
        self._end.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._one(session, url) for url in self._urls))

    async def _one(self, session: aiohttp.ClientSession, url: str) -> None:
        while not self._end.is_set():
            record = Record("", 0, 0, 0.0, self._tokens, 1)
            started = time.perf_counter()
            prompt = self._prompts.draw(self._tokens)
            await send_one(session, url, self._model, prompt, record, started)
            # Busy two thirds of the time; a dead engine is not hammered.
            await asyncio.sleep(max(0.05, (time.perf_counter() - started) / 2))


async def replay(
    url: str,
    model: str,
    rows: Sequence[TraceRow],
    prompts: Sequence[Sequence[int]],
    policy: str = "",
    repetition: int = 0,
    done: Callable[[], object] = lambda: None,
) -> list[Record]:
    """Send requests when they are due, whether or not others are answered.

    Args:
        url: Base URL of the proxy.
        model: Served model name.
        rows: Arrivals and lengths.
        prompts: Token ids, one list for each row.
        policy: For the records.
        repetition: For the records.
        done: Called after each request.

    Returns:
        A record for each row, in that order.
    """
    records = [
        Record(policy, repetition, i, r.arrived_at_s, r.prompt_tokens, r.output_tokens)
        for i, r in enumerate(rows)
    ]
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        start = time.perf_counter() + 0.1

        async def one(record: Record, prompt: Sequence[int]) -> None:
            due = start + record.due_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await send_one(session, url, model, prompt, record, due)
            done()

        async with asyncio.TaskGroup() as group:
            for record, prompt in zip(records, prompts, strict=True):
                group.create_task(one(record, prompt))
    return records
