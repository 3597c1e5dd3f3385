# SPDX-License-Identifier: Apache-2.0
"""What the profiler says to an engine, over its OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from vllm_kairos.core.messages import schedule_params
from vllm_kairos.files import UserError

#: Token ids that prompts are drawn from: past the special ones of common
#: tokenizers, within the vocabulary of the smallest models.
_FIRST_TOKEN_ID = 256
_LAST_TOKEN_ID = 1000

_CACHE_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine says of itself.

    Attributes:
        model: Name it serves.
        root: Path or repository of the model.
        max_model_len: Longest sequence, prompt and output.
        version: vLLM version.
        kv_tokens: KV cache size in tokens, zero where it does not say.
        block_size: Tokens of a KV block, zero where it does not say.
    """

    model: str
    root: str
    max_model_len: int
    version: str
    kv_tokens: int
    block_size: int


class EngineClient:
    """A client of one engine.

    Args:
        url: Base URL of its server.
        seed: Of the prompts' token ids.
    """

    def __init__(self, url: str, seed: int = 0):
        self.url = url.rstrip("/")
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None
        self._model = ""
        self._tickets = 0

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def _get(self, path: str) -> str:
        assert self._session is not None
        try:
            async with self._session.get(
                self.url + path, timeout=aiohttp.ClientTimeout(total=30)
            ) as response:
                text = await response.text()
                if response.status != 200:
                    raise UserError(
                        f"engine {self.url}{path}: status {response.status}, "
                        "expected 200"
                    )
                return text
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise UserError(
                f"engine {self.url}: does not answer ({error or 'timed out'}), "
                "expected a vLLM server"
            ) from error

    async def served(self) -> Served:
        """What the engine serves.

        Raises:
            UserError: It does not answer as vLLM does.
        """
        try:
            card = json.loads(await self._get("/v1/models"))["data"][0]
            version = json.loads(await self._get("/version"))["version"]
            model, root = str(card["id"]), str(card.get("root") or card["id"])
            max_model_len = int(card["max_model_len"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"engine {self.url}: /v1/models and /version do not answer as "
                "vLLM 0.18 does"
            ) from error
        self._model = model
        labels = _cache_labels(await self.metrics())
        block = int(labels.get("block_size", 0) or 0)
        blocks = labels.get("num_gpu_blocks", "0")
        kv_tokens = block * int(blocks) if blocks.isdigit() else 0
        return Served(model, root, max_model_len, str(version), kv_tokens, block)

    async def metrics(self) -> str:
        """The engine's Prometheus text."""
        return await self._get("/metrics")

    def prompt(self, tokens: int) -> list[int]:
        """A prompt no prefix cache has seen."""
        return self._random.choices(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID), k=tokens)

    async def generate(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        *,
        chunks: Sequence[int] = (),
        params: dict[str, Any] | None = None,
        first_token: asyncio.Event | None = None,
    ) -> dict[str, Any]:
        """Run one request to its end.

        Args:
            prompt: Token ids.
            output_tokens: Exactly as many are generated.
            chunks: Chunk schedule the prefill must follow.
            params: Other ``kv_transfer_params``.
            first_token: Set when the first token arrives; the answer is then
                streamed and not returned.

        Raises:
            UserError: The engine refused it or went away.
        """
        assert self._session is not None
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": first_token is not None,
        }
        transfer = dict(params or {})
        if chunks:
            self._tickets += 1
            transfer |= schedule_params(f"profile-{self._tickets}", chunks)
        if transfer:
            body["kv_transfer_params"] = transfer
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body
            ) as response:
                if response.status != 200:
                    text = " ".join((await response.text()).split())
                    raise UserError(
                        f"engine {self.url}: status {response.status} for a prompt "
                        f"of {len(prompt)} tokens: {text[:200]}"
                    )
                if first_token is None:
                    answer: dict[str, Any] = await response.json()
                    return answer
                async for _ in response.content.iter_any():
                    first_token.set()
                return {}
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            raise UserError(
                f"engine {self.url}: went away during a request "
                f"({error or type(error).__name__})"
            ) from error


def _cache_labels(metrics: str) -> dict[str, str]:
    for line in metrics.splitlines():
        if line.startswith("vllm:cache_config_info"):
            return dict(_CACHE_LABEL.findall(line))
    return {}
