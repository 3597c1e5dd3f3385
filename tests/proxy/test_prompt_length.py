# SPDX-License-Identifier: Apache-2.0
"""Prompt lengths: the engine's own, or close to it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.proxy.conftest import MakeCluster
from tests.proxy.stubs import StubEngine
from tests.proxy.test_proxy_command import answers, free_port, node_flags, process
from vllm_kairos.proxy.body import CHAT, COMPLETIONS, Body
from vllm_kairos.proxy.metrics import ProxyMetrics
from vllm_kairos.proxy.prompt_length import PromptCounter

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{{ extra }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that puts one BOS before a text."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


async def ready(counter: PromptCounter) -> PromptCounter:
    counter.start()
    for _ in range(1200):
        if counter.ready:
            return counter
        await asyncio.sleep(0.05)
    pytest.fail("the tokenizer did not load")


def completion(**fields: Any) -> Body:
    return Body(json.dumps(fields).encode(), COMPLETIONS)


def chat(**fields: Any) -> Body:
    return Body(json.dumps(fields).encode(), CHAT)


async def test_lengths_are_the_tokenizers_own(tokenizer_path: Path) -> None:
    counter = await ready(PromptCounter(str(tokenizer_path), ProxyMetrics(), 30.0))
    hello = [{"role": "user", "content": "hello"}]
    parts = [
        {"type": "text", "text": "he"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "llo"},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "abc"}'}}
    tool = {"type": "function", "function": {"name": "seven77"}}
    base = 1 + len("<|user|>hello") + len("<|assistant|>")
    cases = [
        (completion(prompt="hello"), 6, 6),
        (completion(prompt="hello", add_special_tokens=False), 5, 5),
        (completion(prompt="hello", truncate_prompt_tokens=3), 3, 3),
        (completion(prompt=["hello", "hi"]), 9, 6),
        (completion(prompt=[1, 2, 3, 4]), 4, 4),
        (completion(prompt=[[1, 2, 3], [4]]), 4, 3),
        (chat(messages=hello), base, base),
        (chat(messages=hello, add_generation_prompt=False), base - 13, base - 13),
        (chat(messages=hello, add_special_tokens=True), base + 1, base + 1),
        (chat(messages=hello, tools=[tool]), base + 7, base + 7),
        (
            chat(messages=hello, chat_template_kwargs={"extra": "xy"}),
            base + 2,
            base + 2,
        ),
        (chat(messages=[{"role": "user", "content": parts}]), base + 1, base + 1),
        (chat(messages=[{**hello[0], "tool_calls": [call]}]), base + 3, base + 3),
    ]
    for body, tokens, longest in cases:
        length = await counter.count(body)
        assert (length.tokens, length.longest, length.exact) == (
            *(tokens, longest),
            True,
        ), body.fields
    counter.stop()


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": "user", "content": "x"}], chat_template="{{ 1/0 }}"),
        chat(messages="nonsense"),
        chat(messages=[{"role": "user", "content": "x", "tool_calls": [{}]}]),
        chat(messages=[3, None]),
        chat(),
        completion(),
        completion(prompt=None),
        completion(prompt={"a": 1}),
        completion(prompt=[]),
        completion(prompt=[None]),
        completion(prompt=["a", 3, [1]]),
        completion(prompt=[1, "a"]),
    ],
)
async def test_what_cannot_be_counted_is_estimated_and_never_raises(
    tokenizer_path: Path, body: Body
) -> None:
    counter = await ready(PromptCounter(str(tokenizer_path), ProxyMetrics(), 30.0))
    length = await counter.count(body)
    assert length.tokens >= 1 and length.longest >= 1
    counter.stop()


async def test_a_tokenizer_that_cannot_be_loaded_leaves_an_estimate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter = PromptCounter(str(tmp_path), ProxyMetrics())
    counter.start()
    for _ in range(1200):
        if "cannot be loaded" in caplog.text:
            break
        await asyncio.sleep(0.05)
    assert "prompt lengths are estimated" in caplog.text
    length = await counter.count(completion(prompt="x" * 400))
    assert (length.tokens, length.exact) == (100, False)
    counter.stop()


async def test_a_name_the_hub_does_not_give_is_told_in_one_line_without_retries(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    import huggingface_hub

    def model_info(name: str, **_: object) -> None:
        asked.append(name)
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise ConnectionError("x" * 1000)

    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    counter = PromptCounter("nobody/has-this", ProxyMetrics())
    await asyncio.to_thread(counter._load, "nobody/has-this")
    assert asked == ["nobody/has-this"] and not counter.ready
    (record,) = caplog.records
    told = record.getMessage()
    assert "nobody/has-this" in told and "ConnectionError" in told and len(told) < 250
    assert "Retrying" not in capfd.readouterr().err


async def test_a_slow_tokenizer_is_not_waited_for_and_still_calibrates() -> None:
    metrics = ProxyMetrics()
    counter = PromptCounter("unused", metrics, patience_s=0.02)

    class Slow:
        def __call__(self, text: str, **_: object) -> Any:
            time.sleep(0.1)
            return type("Encoded", (), {"input_ids": [0] * (len(text) // 2)})

    from concurrent.futures import ThreadPoolExecutor

    counter._pool = ThreadPoolExecutor(1)
    counter._tokenizer = Slow()
    body = completion(prompt="x" * 400)
    started = time.monotonic()
    first = await counter.count(body)
    assert time.monotonic() - started < 0.09
    assert (first.tokens, first.exact) == (100, False)
    await asyncio.sleep(0.2)
    assert counter.estimate(body).tokens > 100
    assert b'prompt_lengths_total{source="late"} 1.0' in metrics.text()
    counter.stop()


async def test_an_engines_own_counts_calibrate_the_estimate() -> None:
    counter = PromptCounter(None, ProxyMetrics())
    body = completion(prompt="x" * 1000)
    assert counter.estimate(body).tokens == 250
    for _ in range(100):
        counter.learn(body, 500)
    assert 490 <= counter.estimate(body).tokens <= 500
    # A count of token ids says nothing about text.
    counter.learn(completion(prompt=[1, 2]), 2)
    assert 490 <= counter.estimate(body).tokens <= 500


@pytest.mark.parametrize(
    ("policy", "options", "with_profile", "loads"),
    [
        ("disagg", {}, False, False),
        # The schedule of a fallback goes by the prompt's length.
        ("disagg", {}, True, True),
        ("disagg", {"balance": "least"}, False, True),
        ("kairos", {}, False, True),
    ],
)
def test_a_tokenizer_is_loaded_only_where_lengths_are_asked_for(
    cluster: MakeCluster,
    tokenizer_path: Path,
    policy: str,
    options: dict[str, str],
    with_profile: bool,
    loads: bool,
) -> None:
    c = cluster(
        1,
        1,
        policy,
        with_profile,
        tokenizer=str(tokenizer_path),
        policy_options=options,
    )
    counter = c.proxy.kairos.service.counter  # type: ignore[attr-defined]
    assert (counter._pool is not None) == loads


async def test_a_proxy_counts_tokens_without_pytorch(
    engines: list[StubEngine], tokenizer_path: Path
) -> None:
    port = free_port()
    words = [*node_flags(engines, port), "--tokenizer", tokenizer_path]
    words += ["--scheduling-policy", "kairos"]
    url = f"http://127.0.0.1:{port}"
    async with process("-m", "vllm_kairos.cli", "proxy", *words) as run:
        await answers(url, run)
        async with aiohttp.ClientSession() as client:
            for _ in range(1200):
                async with client.get(f"{url}/status") as answer:
                    if (await answer.json())["tokenizer_ready"]:
                        break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the tokenizer did not load")
        mapped = Path(f"/proc/{run.pid}/maps").read_text()
        run.terminate()
        out, _ = await run.communicate()
    assert "tokenizers" in mapped and "libtorch" not in mapped
    assert b"terminated" in out and b"PyTorch" not in out
