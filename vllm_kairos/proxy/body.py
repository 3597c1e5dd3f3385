# SPDX-License-Identifier: Apache-2.0
"""A request body: what it asks for, and the two legs it is split into.

Facts about the fields are those of vLLM's ``CompletionRequest`` and
``ChatCompletionRequest``; nothing is validated here, that is the engine's
work, whose verdict is passed on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

#: What NIXL's connector reads on the engine that prefills for another one.
REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

#: Deepest nesting of a body. What nests as deep as the interpreter reads just so
#: would fail later on, with its KV on a prefill node already.
MOST_NESTED = 256

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


class Body:
    """One request body.

    Client-sent ``kv_transfer_params`` are dropped, also where vLLM would
    find them inside ``vllm_xargs``: they name hosts for the engine to connect
    to.

    Args:
        raw: The body as received.
        path: `COMPLETIONS` or `CHAT`.

    Raises:
        ValueError: It is not a JSON object, or nests deeper than `MOST_NESTED`.
    """

    __slots__ = ("fields", "path", "_lenient")

    def __init__(self, raw: bytes, path: str):
        self._lenient = False
        try:
            fields = _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # The engine reads with the standard library, which takes NaN and
            # lone surrogates: what it would serve is not refused here.
            fields = json.loads(raw)
            self._lenient = True
        if not isinstance(fields, dict):
            raise ValueError(f"body is a {type(fields).__name__}, expected an object")
        # Most bodies have fewer brackets than that in all.
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTED and _nests_deeper(fields):
            raise ValueError(f"body nests deeper than {MOST_NESTED} levels")
        fields.pop("kv_transfer_params", None)
        extra = fields.get("vllm_xargs")
        if isinstance(extra, dict):
            extra.pop("kv_transfer_params", None)
        self.fields: dict[str, Any] = fields
        self.path = path

    def encode(self, **changes: Any) -> bytes:
        """The body as JSON, some fields replaced; ``...`` leaves one out."""
        fields = self.fields
        if changes:
            fields = {**fields, **changes}
            for name, value in changes.items():
                if value is ...:
                    del fields[name]
        if self._lenient:
            return json.dumps(fields).encode()
        return _encoder.encode(fields)

    def with_params(self, params: Mapping[str, Any] | None) -> bytes:
        """The body for the node that answers the client.

        Args:
            params: Its ``kv_transfer_params``, `None` for none.
        """
        return self.encode(kv_transfer_params=params) if params else self.encode()

    def prefill_leg(self, params: Mapping[str, Any] | None) -> bytes:
        """The body for a prefill node: one token, not streamed.

        ``min_tokens`` may not exceed ``max_tokens`` in vLLM, so it is clamped.

        Args:
            params: Its ``kv_transfer_params``, `None` for none.
        """
        changes: dict[str, Any] = {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in self.fields:
            changes["max_completion_tokens"] = 1
        if self.fields.get("stream") and "stream_options" in self.fields:
            # Left in without `stream`: the engine refuses that here and now.
            changes["stream_options"] = ...
        least = self.fields.get("min_tokens")
        if isinstance(least, int) and least > 1:
            changes["min_tokens"] = 1
        if params:
            changes["kv_transfer_params"] = params
        return self.encode(**changes)

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream."""
        return self.fields.get("stream") is True

    @property
    def output_tokens(self) -> int | None:
        """The output limit the client set, `None` where it set none."""
        names = ("max_completion_tokens", "max_tokens")
        for name in names if self.path == CHAT else names[1:]:
            value = self.fields.get(name)
            if isinstance(value, int):
                return value
        return None

    @property
    def prefill_only(self) -> bool:
        """Whether the answer comes out of the prefill: nothing is decoded."""
        most = self.output_tokens
        return most is not None and most <= 1

    @property
    def placeable(self) -> bool:
        """Whether a policy may place it: P/D carries it, or it is one prefill.

        One prefill and no more runs on either kind of node, in chunks as
        well, also where the answer tells of the prompt.
        """
        reason = self.unsplittable()
        told = reason in ("prompt_logprobs", "echo")
        return reason is None or (told and self.prefill_only)

    def unsplittable(self) -> str | None:
        """Why P/D cannot carry this request, `None` where it can.

        - ``n``, ``best_of``, beam search and several prompts are several
          engine requests, and a KV handle is good for one.
        - ``prompt_logprobs`` and ``echo`` are answered from the prompt's own
          forward pass, which a decode node that pulls KV never runs.
        - With forced tools vLLM parses the answer as JSON, which one token of
          it is not.
        - ``prompt_embeds`` are prompts of their own beside `prompt`.
        - Limits that are no integers, or that contradict one another, are for
          the engine that sees them all: the prefill leg hides them, and would
          be work for nothing.
        """
        get = self.fields.get
        for name in ("n", "best_of"):
            if get(name) not in (None, 1):
                return name
        if get("use_beam_search"):
            return "use_beam_search"
        if self.path == COMPLETIONS:
            if get("prompt_embeds") is not None:
                return "prompt_embeds"
            prompt = get("prompt")
            # A list of one prompt is one: lm-eval sends all of its so.
            if (
                isinstance(prompt, list)
                and not is_token_ids(prompt)
                and not (len(prompt) == 1 and isinstance(prompt[0], str | list))
            ):
                return "prompts"
        elif get("tool_choice") not in (None, "none", "auto"):
            return "tool_choice"
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if not isinstance(get(name), int | None):
                return name
        least, most = get("min_tokens"), self.output_tokens
        if least is not None and most is not None and least > most:
            return "min_tokens"
        # Last of all: where one of these is the reason, there is no other.
        if get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        if get("echo"):
            return "echo"
        return None


def _nests_deeper(value: object) -> bool:
    """Whether a value has more than `MOST_NESTED` levels of lists and objects."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def is_token_ids(prompt: object) -> TypeGuard[list[int]]:
    """Whether a completion's prompt is one list of token ids.

    Only the first entry is looked at; a mixed list is refused by the engine.
    """
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and isinstance(prompt[0], int)
        and not isinstance(prompt[0], bool)
    )


class PrefillReply(msgspec.Struct):
    """What the proxy reads of a prefill node's answer.

    Attributes:
        kv_transfer_params: Handle to the KV for the decode node.
        usage: Token counts.
    """

    kv_transfer_params: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """The engine's own count of the prompt."""
        value = (self.usage or {}).get("prompt_tokens")
        return value if isinstance(value, int) and value > 0 else None


_reply_decoder = msgspec.json.Decoder(PrefillReply)


def decode_prefill_reply(data: bytes) -> PrefillReply:
    """A prefill node's answer.

    Raises:
        ValueError: It is not a JSON object of that form.
    """
    try:
        return _reply_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"prefill answer: {error}") from error


def error_body(message: str, kind: str, code: int) -> bytes:
    """An error in the shape vLLM and OpenAI use."""
    return _encoder.encode(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}
    )
