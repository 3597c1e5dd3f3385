# SPDX-License-Identifier: Apache-2.0
"""A server that answers as an engine and logs steps of known latency."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.profiling.synthetic import COLUMNS, TRUTH
from vllm_kairos.core.messages import parse_schedule
from vllm_kairos.core.step_model import StepModel

BUDGET_TOKENS = 1024


@dataclass
class _Request:
    prompt: int
    output: int
    chi: int
    computed: int = 0
    generated: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        return self.generated >= self.output


class StubEngine:
    """One engine with chunked prefill, its clock a thousand times too fast.

    Args:
        step_log: File it writes step records to.
        model: Latency of its steps.
        noise: Lognormal deviation of it.
    """

    def __init__(self, step_log: Path, model: StepModel = TRUTH, noise: float = 0.0):
        self.step_log = step_log
        self.model = model
        self.noise = noise
        self.requests: list[_Request] = []
        self.step = 0
        self.served = 0
        self.refuse = False
        self.logs = True
        self.url = ""
        self._random = random.Random(1)
        step_log.write_text(COLUMNS + "\n")

    async def __aenter__(self) -> StubEngine:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.cancel()
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "stub", "root": "/nowhere/stub", "max_model_len": 4096}
        return web.json_response({"data": [card]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.18.1"})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0\n'
        return web.Response(text=text)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if self.refuse:
            return web.json_response({"error": "not today"}, status=400)
        self.served += 1
        schedule = parse_schedule(body.get("kv_transfer_params"))
        chi = schedule.chunks[0] if schedule else 0
        request = _Request(len(body["prompt"]), body["max_tokens"], chi)
        self.requests.append(request)
        try:
            if not body["stream"]:
                while not request.done:
                    await request.changed.wait()
                    request.changed.clear()
                return web.json_response({"choices": []})
            response = web.StreamResponse()
            await response.prepare(http)
            while not request.done:
                await request.changed.wait()
                request.changed.clear()
                await response.write(b"data: {}\n\n")
            return response
        finally:
            self.requests = [r for r in self.requests if r is not request]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            row = self._one_step()
            if row and self.logs:
                with self.step_log.open("a") as file:
                    file.write(row + "\n")

    def _one_step(self) -> str:
        decoding = [r for r in self.requests if r.computed >= r.prompt and not r.done]
        kv = sum(r.computed + r.generated for r in decoding)
        room = BUDGET_TOKENS - len(decoding)
        tokens = prefix = prefills = 0
        for request in self.requests:
            if request.computed >= request.prompt or room <= 0:
                continue
            most = room
            if request.chi:
                most = min(most, request.chi - len(decoding) - tokens)
            take = min(most, request.prompt - request.computed)
            if take <= 0:
                continue
            tokens, prefix, prefills = (
                tokens + take,
                prefix + request.computed,
                prefills + 1,
            )
            room -= take
            request.computed += take
            if request.computed >= request.prompt:
                request.generated = 1
                request.changed.set()
        if not decoding and not tokens:
            return ""
        for request in decoding:
            request.generated += 1
            request.changed.set()
        ms = self.model.step_ms(len(decoding), kv, tokens, prefix, max(prefills, 1))
        ms *= math.exp(self.noise * self._random.gauss(0, 1))
        self.step += 1
        cells: list[Any] = [
            "stub",
            self.step,
            f"{self.step / 100:.6f}",
            tokens,
            prefills,
            prefix,
            len(decoding),
            kv,
            f"{ms:.4f}",
        ]
        return ",".join(map(str, cells))
