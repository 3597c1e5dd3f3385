# SPDX-License-Identifier: Apache-2.0
"""Real engines joined by NIXL behind the bundled proxy: the same tokens."""

from __future__ import annotations

import csv
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quickstart.engines import core_for
from tests.cluster.client import ask, prompt_ids
from tests.conftest import Cluster
from vllm_kairos.core.messages import schedule_params
from vllm_kairos.core.profile import EngineLimits, FittedPredictor, Profile
from vllm_kairos.files import save_profile

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LENGTHS = (1, 15, 16, 17, 255, 1000, 6000)


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    """Of the order of the tiny model on one core; what it says of the time of
    a step does not matter where every request is deflected."""
    path = tmp_path_factory.mktemp("profile") / "tiny.json"
    save_profile(
        path,
        Profile(
            name="tiny",
            model=str(tiny_model),
            hardware="a core",
            engine_version="0.18.1",
            kind="calibrated",
            created="2026-01-01",
            prefill=FittedPredictor({"1": 10.0, "c": 0.4, "cp": 1e-5}),
            decode=FittedPredictor({"1": 15.0, "B": 0.5, "K": 1e-4}),
            mixed=FittedPredictor({"c": 0.4, "cp": 1e-5}),
            engine=EngineLimits(2048, 64, 60_000),
        ),
    )
    return str(path)


@pytest.fixture(scope="session")
def always_deflecting(cluster: Cluster, profile: str) -> str:
    """URL of a proxy for which a decode node is always the better choice."""
    flags = ["--profile", profile, "--tau-ms", "200", "--alpha", "1000"]
    flags += ["--ttft-slo-ms", "1000000", "--dispatch", "eager"]
    proxy = cluster.proxy("kairos", *flags)
    wait_for_state(proxy.url)
    return proxy.url


def wait_for_state(url: str, seconds: float = 20.0) -> None:
    """Until the proxy has a report of every node."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        text = httpx.get(f"{url}/metrics", timeout=5).text
        ages = [
            line
            for line in text.splitlines()
            if line.startswith("kairos_proxy_state_age_seconds{")
        ]
        if len(ages) >= 2:
            return
        time.sleep(0.1)
    raise AssertionError("no state reports reached the proxy")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_deflected_tokens_equal_those_of_pd_and_of_one_engine(
    cluster: Cluster, always_deflecting: str, length: int, stream: bool
) -> None:
    prompt = prompt_ids(length, seed=length + stream)
    pd_url = cluster.proxy("round_robin").url
    # The deflected one first: it must not find the prompt in a cache.
    deflected = ask(always_deflecting, cluster.model, prompt, stream=stream)
    pd = ask(pd_url, cluster.model, prompt, stream=stream)
    alone = ask(cluster.prefill.url, cluster.model, prompt, stream=stream)
    assert deflected.route == "deflected"
    assert pd.route == "kept"
    assert deflected.text == pd.text == alone.text
    assert len(alone.text) > 0 and deflected.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_deflected_chat_equals_pd_and_one_engine(
    cluster: Cluster, always_deflecting: str, stream: bool
) -> None:
    prompt = "Tell me about the sea. " * 20 + ("Now." if stream else "Go on.")
    arms = [
        ask(url, cluster.model, prompt, chat=True, stream=stream)
        for url in (
            always_deflecting,
            cluster.proxy("round_robin").url,
            cluster.prefill.url,
        )
    ]
    assert [a.route for a in arms] == ["deflected", "kept", ""]
    assert arms[0].text == arms[1].text == arms[2].text


def rows_since(path: Path, count: int) -> list[dict[str, int]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))[count:]
    return [
        {
            "c": int(row["sum_prefill_tokens"]),
            "B": int(row["num_decode_requests"]),
            "n": int(row["num_prefill_requests"]),
        }
        for row in rows
    ]


def records(cluster: Cluster) -> Path:
    path = cluster.decode.spec.step_log
    assert path is not None
    return path


class Decodes:
    """Requests that decode on the decode engine while a test looks at its steps.

    Entered once all of them decode; they go on for long enough.
    """

    def __init__(self, cluster: Cluster, count: int):
        self._records = records(cluster)
        self._count = count
        self._threads = [
            threading.Thread(
                target=ask,
                args=(cluster.decode.url, cluster.model, prompt_ids(40, 900 + i)),
                kwargs={"max_tokens": 1500, "stream": True},
            )
            for i in range(count)
        ]

    def __enter__(self) -> Decodes:
        before = len(rows_since(self._records, 0))
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = rows_since(self._records, before)
            if rows and rows[-1]["B"] == self._count:
                return self
            time.sleep(0.1)
        raise AssertionError("the decodes did not start")

    def in_flight(self) -> int:
        """How many have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()


def test_steps_of_a_deflected_prefill_hold_exactly_chi(cluster: Cluster) -> None:
    chunks = [256, 128, 300, 64, 512]
    before = len(rows_since(records(cluster), 0))
    with Decodes(cluster, 4):
        ask(
            cluster.decode.url,
            cluster.model,
            prompt_ids(252 + 124 + 296 + 60 + 100, seed=31),
            kv_transfer_params=schedule_params("test-chi", chunks),
        )
    time.sleep(0.3)
    steps = rows_since(records(cluster), before)
    first = next((i for i, s in enumerate(steps) if s["c"] == 252), None)
    assert first is not None, steps
    got = steps[first : first + 5]
    assert [s["B"] for s in got] == [4] * 5
    assert [s["c"] + s["B"] for s in got] == [256, 128, 300, 64, 104]


def test_late_joiner_decodes_in_the_next_step(cluster: Cluster) -> None:
    before = len(rows_since(records(cluster), 0))
    pd_url = cluster.proxy("round_robin").url
    with Decodes(cluster, 2):
        long = threading.Thread(
            target=ask,
            args=(cluster.decode.url, cluster.model, prompt_ids(16_000, 1042)),
            kwargs={"kv_transfer_params": schedule_params("joiner", [66] * 260)},
        )
        long.start()
        time.sleep(0.2)
        joiner = ask(pd_url, cluster.model, prompt_ids(70, 1043), max_tokens=20)
        assert joiner.route == "kept"
        long.join()
    time.sleep(0.3)
    steps = [s for s in rows_since(records(cluster), before) if s["n"] == 1]
    chunks = [s for s in steps if s["c"] >= 32 and s["B"] >= 2]
    counts = [s["B"] for s in chunks]
    # The joiner came while the deflected prefill went on beside it.
    assert 3 in counts and counts.index(3) > 0, counts
    assert all(s["c"] + s["B"] <= 66 for s in chunks)


@pytest.mark.parametrize("seed", range(3))
def test_pd_request_is_served_while_decodes_are_in_flight(
    cluster: Cluster, seed: int
) -> None:
    with Decodes(cluster, 2) as decodes:
        pd = ask(cluster.proxy("round_robin").url, cluster.model, prompt_ids(70, seed))
        assert pd.route == "kept"
        assert decodes.in_flight() == 2


def test_every_engine_computes_on_its_own_core(cluster: Cluster) -> None:
    cores = []
    for engine in (cluster.prefill, cluster.decode):
        (core,) = (
            process
            for process in psutil.Process(engine.pid).children(recursive=True)
            if process.name().startswith("VLLM::EngineCor")
        )
        cores.append(os.sched_getaffinity(core.pid))
        tasks = Path(f"/proc/{core.pid}/task")
        messengers = [
            task.name
            for task in tasks.iterdir()
            if (task / "comm").read_text().startswith("ZMQbg/IO")
        ]
        assert messengers
        for thread in messengers:
            assert os.sched_getaffinity(int(thread)) == os.sched_getaffinity(0)
    assert cores == [{core_for(0)}, {core_for(1)}]


def test_prefill_engine_killed_while_requests_wait_on_it(
    cluster: Cluster, profile: str, start_engine: Any
) -> None:
    doomed = start_engine("doomed", core=None)
    proxy = start_engine.proxy([doomed], [cluster.decode], "round_robin")
    prompts = [prompt_ids(2500, seed=50 + i) for i in range(6)]
    expected = [ask(cluster.prefill.url, cluster.model, p).text for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, proxy.url, cluster.model, p) for p in prompts]
        time.sleep(1.0)
        doomed.kill()
        got = [a.result() for a in answers]
    assert [a.text for a in got] == expected
    assert any(a.route == "fallback" for a in got)
