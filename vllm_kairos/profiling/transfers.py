# SPDX-License-Identifier: Apache-2.0
"""The KV link, from the connector's own transfer records.

vLLM's NixlConnector counts bytes and seconds of every transfer and shows them
as Prometheus histograms (``vllm:nixl_bytes_transferred``,
``vllm:nixl_xfer_time_seconds``). The sums' differences around one request are
that request's own transfer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LinearRegression

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.profile import KvLink
from vllm_kairos.files import UserError
from vllm_kairos.profiling.client import EngineClient

_SAMPLE = re.compile(
    r"^vllm:nixl_(bytes_transferred|xfer_time_seconds)_(sum|count)(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)

#: Prompt lengths whose KV is moved, cut to what the engines take.
LENGTHS = (64, 256, 1024, 4096, 8192)
_REPEATS = 3
#: Statistics come with a later step's output; wait this long for them.
_LATEST_RECORD_S = 2.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One KV transfer.

    Attributes:
        tokens: Prompt tokens whose KV was moved.
        size_bytes: Bytes moved.
        ms: Time it took.
    """

    tokens: int
    size_bytes: float
    ms: float


def totals(metrics: str) -> tuple[float, float, float]:
    """``(transfers, bytes, seconds)`` since the engine started.

    Args:
        metrics: Prometheus text of the engine that reads the KV.
    """
    values = dict.fromkeys(
        ("bytes_transferred_count", "bytes_transferred_sum", "xfer_time_seconds_sum"),
        0.0,
    )
    for name, kind, value in _SAMPLE.findall(metrics):
        key = f"{name}_{kind}"
        if key in values:
            # One sample a data-parallel rank.
            values[key] += float(value)
    return (
        values["bytes_transferred_count"],
        values["bytes_transferred_sum"],
        values["xfer_time_seconds_sum"],
    )


def fit_link(transfers: Sequence[Transfer], bytes_per_token: float) -> KvLink:
    """Bandwidth and fixed cost of a link.

    Least squares of ``ms = fixed + bytes / bandwidth`` with neither negative,
    weighted by ``1 / ms²``. The paper's form is the same with no fixed cost.

    Args:
        transfers: Transfers with nothing else on the link.
        bytes_per_token: KV bytes of a token.

    Raises:
        UserError: There are too few transfers or they are all of one size.
    """
    if len(transfers) < 4:
        raise UserError(
            f"{len(transfers)} KV transfers measured, expected at least 4: send "
            "prompts of several lengths through the prefill engine"
        )
    size = np.array([t.size_bytes for t in transfers])
    ms = np.array([t.ms for t in transfers])
    if np.unique(size).size < 2:
        raise UserError(
            f"every KV transfer moved {size[0]:.0f} bytes, expected prompts of at "
            "least two lengths"
        )
    features = np.stack([np.ones_like(size), size / size.max()], axis=1)
    model = LinearRegression(positive=True, fit_intercept=False)
    model.fit(features, ms, sample_weight=1.0 / ms**2)
    fixed_ms, slope = (float(c) for c in model.coef_)
    if slope <= 0.0:
        raise UserError(
            "KV transfers take no longer for more bytes, expected an idle link: "
            "measure again with nothing else running"
        )
    link = KvLink(bytes_per_token, 1e3 * float(size.max()) / slope, fixed_ms)
    LinkModel(link.bytes_per_token, link.bytes_per_s or 0.0, link.fixed_ms)
    return link


async def measure_transfers(
    prefill: EngineClient, decode: EngineClient, max_model_len: int
) -> list[Transfer]:
    """Move the KV of prompts of several lengths, one after the other.

    Args:
        prefill: Engine that computes the prompts.
        decode: Engine that fetches their KV over NIXL and decodes.
        max_model_len: Longest sequence both take.

    Raises:
        UserError: An engine refuses, or no transfer shows in the records of
            the decode engine.
    """
    transfers = []
    before = totals(await decode.metrics())
    for _ in range(_REPEATS):
        for tokens in LENGTHS:
            if tokens > max_model_len - 4:
                continue
            prompt = prefill.prompt(tokens)
            answer = await prefill.generate(
                prompt, 1, params={"do_remote_decode": True, "do_remote_prefill": False}
            )
            handle = answer.get("kv_transfer_params")
            if not isinstance(handle, dict):
                raise UserError(
                    f"engine {prefill.url}: no kv_transfer_params in its answer, "
                    "expected one that runs with NixlConnector"
                )
            await decode.generate(prompt, 3, params=handle)
            after = await _next_record(decode, before)
            count, size, seconds = (a - b for a, b in zip(after, before, strict=True))
            before = after
            if count == 1 and size > 0 and seconds > 0:
                transfers.append(Transfer(tokens, size, 1e3 * seconds))
    if not transfers:
        raise UserError(
            f"engine {decode.url}: no KV transfer in its metrics "
            "(vllm:nixl_bytes_transferred), expected one a request"
        )
    return transfers


async def _next_record(
    decode: EngineClient, before: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Totals once another transfer shows in them, or as they are after a while."""
    waited = 0.0
    while True:
        after = totals(await decode.metrics())
        if after[0] > before[0] or waited >= _LATEST_RECORD_S:
            return after
        await asyncio.sleep(0.1)
        waited += 0.1


async def measure_link(
    prefill_url: str, decode_url: str, bytes_per_token: float, seed: int = 0
) -> KvLink:
    """The link between two engines, measured by using it.

    Args:
        prefill_url: Engine that computes prompts.
        decode_url: Engine that fetches their KV.
        bytes_per_token: KV bytes of a token.
        seed: Of the prompts.
    """
    async with (
        EngineClient(prefill_url, seed + 1) as prefill,
        EngineClient(decode_url, seed) as decode,
    ):
        served = await prefill.served()
        longest = min(served.max_model_len, (await decode.served()).max_model_len)
        transfers = await measure_transfers(prefill, decode, longest)
        return fit_link(transfers, bytes_per_token)
