# SPDX-License-Identifier: Apache-2.0
"""A small client of the OpenAI API: whole texts, streamed or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        text: The text generated.
        finish_reason: Why it ended.
        route: Path the proxy took, empty from an engine.
    """

    text: str
    finish_reason: str | None
    route: str


def prompt_ids(tokens: int, seed: int) -> list[int]:
    """A prompt of exactly so many tokens, its own for every seed."""
    return [300 + (seed * 7919 + i * 31 + i * i * 7) % 600 for i in range(tokens)]


def ask(
    url: str,
    model: str,
    prompt: list[int] | str,
    *,
    chat: bool = False,
    stream: bool = False,
    max_tokens: int = 12,
    **more: Any,
) -> Answer:
    """One greedy request; raises for a status other than 200."""
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with httpx.Client(timeout=TIMEOUT_S) as client:
        if not stream:
            got = client.post(url + path, json=body)
            got.raise_for_status()
            return _whole([got.json()], chat, got.headers)
        with client.stream("POST", url + path, json=body) as got:
            got.raise_for_status()
            events = [line[6:] for line in got.iter_lines() if line.startswith("data:")]
    assert events[-1] == "[DONE]"
    return _whole([json.loads(e) for e in events[:-1]], chat, got.headers)


def _whole(parts: list[dict[str, Any]], chat: bool, headers: httpx.Headers) -> Answer:
    text, reason = "", None
    for part in parts:
        for choice in part["choices"]:
            if chat:
                said = choice.get("message") or choice["delta"]
                text += said.get("content") or ""
            else:
                text += choice["text"]
            reason = choice["finish_reason"] or reason
    return Answer(text, reason, headers.get("x-kairos-route", ""))
