# SPDX-License-Identifier: Apache-2.0
"""What a report says of the prefix cache."""

from __future__ import annotations

from tests.engine.test_state_report import snapshot
from tests.engine.virtual import VirtualEngine, make_scheduler
from vllm_kairos.core.messages import TICKET_KEY, decode_report, encode_report


def test_a_report_says_how_much_of_each_prompt_was_cached_when_it_was_begun() -> None:
    e = VirtualEngine(make_scheduler(prefix_caching=True))
    prompt = list(range(100, 740))
    e.add(prompt, 2, params={TICKET_KEY: "first"})
    e.drain()
    e.add([*prompt, *range(60)], 2, params={TICKET_KEY: "second"})
    deflected = e.add([*prompt, *range(5, 55)], 2, chunks=[128])
    e.add(prompt, 2, remote=True, params={TICKET_KEY: "fetched"})
    e.add(100, 2)
    e.step()
    e.step()
    report = decode_report(encode_report(snapshot(e)))
    assert report.prefix_caching
    assert report.cached == [
        ("first", 0),
        ("second", 640),
        (f"ticket-{deflected}", 640),
    ]


def test_a_report_says_that_prefixes_are_not_cached() -> None:
    e = VirtualEngine(make_scheduler(prefix_caching=False))
    assert not snapshot(e).prefix_caching
