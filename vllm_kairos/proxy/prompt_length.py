# SPDX-License-Identifier: Apache-2.0
"""Prompt length: exact by the model's tokenizer, or a calibrated estimate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from vllm_kairos.proxy.body import CHAT, Body, is_token_ids
from vllm_kairos.proxy.metrics import ProxyMetrics
from vllm_kairos.proxy.residency import prefix_hashes

logger = logging.getLogger(__name__)

#: What English text has before anything was learnt.
_CHARS_PER_TOKEN = 4.0
#: What a chat template adds around a message, characters.
_MESSAGE_CHARS = 24
#: Weight of the past in the running ratio.
_MEMORY = 0.95
#: Longest wait for the hub to say that it has a tokenizer.
_HUB_TIMEOUT_S = 10.0
#: An exact count is not waited for behind this many others.
_MOST_WAITING = 32


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a request's prompts.

    Attributes:
        tokens: Prompt tokens, all prompts.
        longest: Tokens of the longest prompt.
        exact: Counted, not estimated.
        prefixes: `prefix_hashes` of a single prompt, empty where its tokens
            are not known.
    """

    tokens: int
    longest: int
    exact: bool
    prefixes: tuple[int, ...] = ()


def load_tokenizers_alone() -> None:
    """From now on this process's transformers is imported without PyTorch.

    Nothing here computes with it, and it is most of what the import of a
    tokenizer takes: about 15 s of a CPU and 700 MiB. For a process that is a
    proxy and nothing else.
    """
    os.environ.setdefault("USE_TORCH", "0")
    # It would advise to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class PromptCounter:
    """Counts prompt tokens off the event loop.

    Args:
        tokenizer: Name or path for transformers' ``AutoTokenizer``; `None`
            for estimates only.
        metrics: Counts where lengths came from.
        patience_s: How long a request waits for its exact length.
    """

    def __init__(
        self, tokenizer: str | None, metrics: ProxyMetrics, patience_s: float = 0.05
    ):
        self._name = tokenizer
        self._metrics = metrics
        self._patience_s = patience_s
        self._tokenizer: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._chars_per_token = _CHARS_PER_TOKEN

    @property
    def ready(self) -> bool:
        """Whether the tokenizer is loaded."""
        return self._tokenizer is not None

    def start(self) -> None:
        """Load the tokenizer in the background."""
        if self._name is not None and self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="kairos-tokenizer")
            self._pool.submit(self._load, self._name)

    def stop(self) -> None:
        """Let go of the thread; counts under way are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _load(self, name: str) -> None:
        try:
            # Seconds of import that `--tokenizer none` need not pay.
            from transformers import AutoTokenizer

            with _quiet("huggingface_hub", "transformers"):
                try:
                    # What is on this machine needs no network, and no wait
                    # for one that is not there.
                    loaded = AutoTokenizer.from_pretrained(name, local_files_only=True)
                except Exception:
                    if os.path.exists(name):
                        raise
                    # Asked once: loading itself asks many times over.
                    from huggingface_hub import model_info

                    model_info(name, timeout=_HUB_TIMEOUT_S)
                    loaded = AutoTokenizer.from_pretrained(name)
            self._tokenizer = loaded
        except Exception as error:
            # Anything from a missing file to a broken install: routing goes
            # on by estimates either way.
            logger.warning(
                "Tokenizer %s cannot be loaded (%s); prompt lengths are estimated "
                "(--tokenizer names another)",
                name,
                _why(name, error),
            )

    def estimate(self, body: Body) -> Length:
        """A length from the length of the text."""
        lengths = [
            part if isinstance(part, int) else len(part) / self._chars_per_token
            for part in _parts(body)
        ] or [1]
        return _length([max(1, round(n)) for n in lengths], False)

    def learn(self, body: Body, tokens: int) -> None:
        """Calibrate the estimate with an engine's own count."""
        chars = sum(len(part) for part in _parts(body) if isinstance(part, str))
        if chars and tokens > 0:
            self._learn(chars, tokens)

    def _learn(self, chars: int, tokens: int) -> None:
        ratio = min(max(chars / tokens, 0.1), 100.0)
        self._chars_per_token = _MEMORY * self._chars_per_token + (1 - _MEMORY) * ratio

    async def count(self, body: Body) -> Length:
        """The length of a request's prompts, exact where it comes in time."""
        parts = _parts(body)
        counts = [part for part in parts if isinstance(part, int)]
        if parts and len(counts) == len(parts):
            self._metrics.length("token_ids")
            length = _length(counts, True)
            prompt = body.fields.get("prompt")
            if len(counts) == 1 and is_token_ids(prompt):
                # A few tens of microseconds for a thousand tokens.
                return replace(length, prefixes=_prefixes(body, prompt))
            return length
        if self._tokenizer is None or self._pool is None:
            self._metrics.length("estimate")
            return self.estimate(body)
        if self._waiting >= _MOST_WAITING or body.fields.get("chat_template"):
            # A template of the client's own is not run here.
            self._metrics.length("estimate")
            return self.estimate(body)
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, _count, self._tokenizer, body, parts
        )
        future.add_done_callback(lambda done: self._counted(done, parts))
        done, _ = await asyncio.wait((future,), timeout=self._patience_s)
        if done and not future.cancelled() and future.exception() is None:
            self._metrics.length("tokenizer")
            return future.result()
        self._metrics.length("late" if not done else "failed")
        return self.estimate(body)

    def _counted(self, future: asyncio.Future[Length], parts: list[str | int]) -> None:
        self._waiting -= 1
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            # The engine will say what is wrong with the request.
            logger.debug("Prompt not counted: %s", error)
            return
        chars = sum(len(part) for part in parts if isinstance(part, str))
        tokens = future.result().tokens
        if chars and tokens and all(isinstance(part, str) for part in parts):
            self._learn(chars, tokens)


def _why(name: str, error: Exception) -> str:
    """What kept a tokenizer from being loaded, short."""
    text = str(error).partition("\n")[0] or type(error).__name__
    if os.path.exists(name):
        return text
    # The hub's own words hold the whole chain of causes.
    kind = type(error).__name__
    return f"no such folder, not in the local cache, and the hub gives {kind}"


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Loggers that retry aloud say nothing; one line tells how it ended."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _length(counts: list[int], exact: bool) -> Length:
    return Length(max(1, sum(counts)), max([1, *counts]), exact)


def _parts(body: Body) -> list[str | int]:
    """Texts of the prompts; token counts where they come as token ids."""
    if body.path == CHAT:
        messages = body.fields.get("messages")
        texts = []
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                texts.append(_text(message.get("content")) + " " * _MESSAGE_CHARS)
        tools = body.fields.get("tools")
        if tools:
            texts.append(json.dumps(tools))
        return ["".join(texts)] if texts else []
    prompt = body.fields.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if is_token_ids(prompt):
        return [len(prompt)]
    out: list[str | int] = []
    for one in prompt if isinstance(prompt, list) else ():
        if isinstance(one, str):
            out.append(one)
        elif isinstance(one, list):
            out.append(len(one))
    return out


def _text(content: object) -> str:
    """A message's text; parts are joined as vLLM joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [
        part if isinstance(part, str) else str(part.get("text") or "")
        for part in content
        if isinstance(part, (str, dict))
    ]
    return "\n".join(text for text in texts if text)


def _prefixes(body: Body, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Hashes of the prompt's prefixes; none where tokens are not all of it."""
    fields = body.fields
    if fields.get("truncate_prompt_tokens") is not None or _has_media(fields):
        return ()
    if fields.get("prompt_logprobs") is not None or fields.get("echo"):
        # vLLM computes such a prompt whole, whatever its cache holds.
        return ()
    try:
        salt = (fields.get("model"), fields.get("cache_salt"))
        return prefix_hashes(token_ids, salt)
    except (TypeError, OverflowError):
        # The engine will say what is wrong with the request.
        return ()


def _has_media(fields: Mapping[str, Any]) -> bool:
    """Whether a chat holds more than text: its tokens do not tell what."""
    messages = fields.get("messages")
    return any(
        isinstance(part, dict) and part.get("type") not in (None, "text")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def _count(tokenizer: Any, body: Body, parts: list[str | int]) -> Length:
    """Runs on the tokenizer's thread."""
    fields = body.fields
    if body.path == CHAT:
        texts: list[str | int] = [_render(tokenizer, fields)]
        special = fields.get("add_special_tokens") is True
    else:
        texts = parts
        special = fields.get("add_special_tokens") is not False
    prefixes: tuple[int, ...] = ()
    counts = []
    for text in texts:
        if isinstance(text, int):
            counts.append(text)
            continue
        ids = tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        counts.append(len(ids))
        if len(texts) == 1:
            prefixes = _prefixes(body, ids)
    most = fields.get("truncate_prompt_tokens")
    if isinstance(most, int) and most > 0:
        counts = [min(n, most) for n in counts]
    return replace(_length(counts, True), prefixes=prefixes)


def _render(tokenizer: Any, fields: Mapping[str, Any]) -> str:
    """The chat as text, by the tokenizer's own template."""
    extra = {
        name: fields[name]
        for name in ("documents", "reasoning_effort")
        if fields.get(name) is not None
    }
    generate = fields.get("add_generation_prompt")
    rendered = tokenizer.apply_chat_template(
        [_message(m) for m in fields["messages"]],
        tools=fields.get("tools") or None,
        tokenize=False,
        add_generation_prompt=True if generate is None else bool(generate),
        continue_final_message=bool(fields.get("continue_final_message")),
        **{**extra, **(fields.get("chat_template_kwargs") or {})},
    )
    return str(rendered)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to the template."""
    out = dict(message)
    if isinstance(out.get("content"), list):
        out["content"] = _text(out["content"])
    calls = out.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [_tool_call(call) for call in calls]
    return out


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}
