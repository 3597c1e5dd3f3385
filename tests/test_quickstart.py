# SPDX-License-Identifier: Apache-2.0
"""The quick start's parts: load generator, figures, scaling, bad input."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from quickstart import machine, report
from quickstart.compare import segments
from quickstart.load import Prompts, Record, replay
from quickstart.processes import Server, StartError, free_ports, wait_until_ready
from vllm_kairos.core.profile import FittedPredictor, Profile
from vllm_kairos.sim.traces import TraceRow
from vllm_kairos.sim.workload import bursty

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIMITS = report.Limits(tau_ms=70.0, ttft_slo_ms=4000.0)


def record(policy: str = "kairos", **fields: Any) -> Record:
    tokens = fields.pop("token_s", [1.0, 1.05, 1.1])
    out = Record(policy, 0, 0, 0.0, 10, len(tokens), **fields)
    out.token_s = tokens
    out.tokens = list(range(len(tokens)))
    return out


def profile(prefill_ms: float = 0.5, decode_ms: float = 20.0) -> Profile:
    return Profile(
        name="test",
        model="tiny-llama",
        hardware="cpu",
        engine_version="0.18.1",
        kind="measured",
        created="2026-01-01",
        prefill=FittedPredictor({"1": 10.0, "c": prefill_ms, "cc": 1e-5}),
        decode=FittedPredictor(
            {"1": decode_ms, "B": 0.5}, residual_quantiles={"0.95": 1.3}
        ),
        mixed=FittedPredictor({"c": prefill_ms}),
    )


class StubProxy:
    """Streams tokens at given gaps, and answers by the prompt's first token."""

    def __init__(self, gap_s: float = 0.03):
        self.gap_s = gap_s
        self.bodies: list[dict[str, Any]] = []
        self.arrived: list[float] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.arrived.append(time.perf_counter())
        self.bodies.append(body)
        behaviour = body["prompt"][0]
        if behaviour == 1:
            return web.json_response({"message": "no room"}, status=503)
        answer = web.StreamResponse(headers={"x-kairos-route": "deflected"})
        await answer.prepare(request)
        wanted = body["max_tokens"] - (behaviour == 2)
        for index in range(wanted):
            await asyncio.sleep(self.gap_s)
            choice = {"text": "", "token_ids": [index]}
            await answer.write(
                f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            )
            if behaviour == 3:
                assert request.transport is not None
                request.transport.abort()
                return answer
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def serve(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_requests_are_sent_when_due_though_none_is_answered() -> None:
    stub = StubProxy(gap_s=0.2)
    runner, url = await stub.serve()
    rows = [TraceRow(0.05 * i, 4, 3) for i in range(8)]
    records = await replay(url, "m", rows, [[9] * 4] * 8, "kairos", 2)
    await runner.cleanup()
    gaps = np.diff(stub.arrived)
    assert gaps.max() < 0.15, "the generator waited for an answer"
    assert not any(r.failed for r in records)
    assert all(r.deflected and r.repetition == 2 for r in records)
    for r in records:
        assert 190 < r.ttft_ms < 500
        assert len(r.tbt_ms) == 2 and all(150 < gap < 400 for gap in r.tbt_ms)
    assert stub.bodies[0]["ignore_eos"] and stub.bodies[0]["stream"]


async def test_refusals_short_answers_and_broken_streams_are_failures() -> None:
    stub = StubProxy(gap_s=0.001)
    runner, url = await stub.serve()
    rows = [TraceRow(0.0, 1, 4)] * 4
    records = await replay(url, "m", rows, [[0], [1], [2], [3]])
    await runner.cleanup()
    assert [r.failed for r in records] == [False, True, True, True]
    assert "503" in records[1].error and "no room" in records[1].error
    assert records[2].error == "3 of 4 tokens came"
    assert records[3].error


async def test_a_proxy_that_is_not_there_is_a_failure_of_each_request() -> None:
    (port,) = free_ports(1)
    rows = [TraceRow(0.0, 1, 4)] * 2
    records = await replay(f"http://127.0.0.1:{port}", "m", rows, [[5], [5]])
    assert all(r.failed and r.status == 0 for r in records)


def test_summary_counts_what_the_rows_say() -> None:
    smooth = [0.5 + 0.05 * i for i in range(21)]
    jerky = [0.5, 0.6, 0.65]
    records = [
        record(token_s=smooth, route="deflected"),
        record(token_s=jerky, route="kept"),
        record(token_s=[5.0, 5.05], route="kept"),
        record(token_s=[1.0], error="HTTP 500"),
    ]
    got = report.summarize(records, LIMITS)
    assert (got["requests"], got["failures"], got["deflections"]) == (4, 1, 1)
    assert got["ttft_ms"] == {"p50": 500.0, "p95": 4550.0, "p99": 4910.0, "max": 5000.0}
    assert got["tbt_ms"]["max"] == 100.0
    assert got["tbt_over_slo_share"] == round(1 / 23, 6)
    assert got["slo_attainment"] == 0.25, "late, jerky and failed ones do not count"
    assert got["output_tokens_per_s"] == round(26 / 5.05, 3)


def test_an_arm_of_failures_has_no_figures_but_a_table() -> None:
    got = report.summarize([record(token_s=[], error="gone")], LIMITS)
    assert got["ttft_ms"]["p95"] is None and got["output_tokens_per_s"] is None
    assert got["slo_attainment"] == 0.0
    assert "-" in report.table({"kairos": got}, LIMITS)


def test_rows_written_give_back_the_summary(tmp_path: Path) -> None:
    records = [record(token_s=[0.1 * i, 0.1 * i + 0.06]) for i in range(1, 5)]
    report.write_rows(tmp_path / "requests.csv", records)
    with (tmp_path / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ttfts = [float(row["ttft_ms"]) for row in rows]
    gaps = [float(gap) for row in rows for gap in row["tbt_ms"].split()]
    got = report.summarize(records, LIMITS)
    assert got["ttft_ms"]["p95"] == pytest.approx(np.percentile(ttfts, 95), abs=0.01)
    assert got["tbt_ms"]["p99"] == pytest.approx(np.percentile(gaps, 99), abs=0.01)
    report.draw(tmp_path / "cdf.png", records, LIMITS)
    assert (tmp_path / "cdf.png").read_bytes().startswith(b"\x89PNG")


def test_only_decode_steps_within_the_runs_count(tmp_path: Path) -> None:
    log = tmp_path / "decode.steps.csv"
    log.write_text(
        "time_s,num_decode_requests,latency_ms\n"
        "5,1,500\n10,1,80\n11,2,20\n12,0,500\n13,3,30\n14,1,69\n30,1,500\n"
    )
    share = report.decode_steps_over([log, tmp_path / "none"], [(10, 14)], 70.0)
    assert share == 0.25
    assert report.decode_steps_over([log], [(50, 60)], 70.0) is None


def test_segments_keep_every_request_and_every_gap() -> None:
    rows = bursty(50, seed=3)
    runs = segments(rows, 3)
    assert [len(run) for run in runs] == [17, 17, 16]
    assert [r.prompt_tokens for run in runs for r in run] == [
        r.prompt_tokens for r in rows
    ]
    gaps = np.diff([0.0] + [r.arrived_at_s for r in rows])
    got = [g for run in runs for g in np.diff([0.0] + [r.arrived_at_s for r in run])]
    assert got == pytest.approx(gaps)


@pytest.mark.parametrize("speed", [0.05, 0.5, 2.0])
def test_the_workload_fits_machines_of_any_speed(speed: float) -> None:
    measured = profile(prefill_ms=speed)
    median = machine.tokens_within(measured, machine.MEDIAN_PREFILL_MS, 2048)
    assert machine.prefill_ms(measured, median, 2048) <= machine.MEDIAN_PREFILL_MS
    assert machine.prefill_ms(measured, median + 1, 2048) > machine.MEDIAN_PREFILL_MS
    rows = machine.scale_lengths(bursty(300), median, 16383)
    assert np.median([r.prompt_tokens for r in rows]) == pytest.approx(median, rel=0.02)
    assert max(r.prompt_tokens + r.output_tokens for r in rows) <= 16383
    rate = machine.rate_for(measured, rows, 1, 2048)
    busy_ms = sum(machine.prefill_ms(measured, r.prompt_tokens, 2048) for r in rows)
    assert rate * busy_ms / len(rows) == pytest.approx(1e3 * machine.LOAD)


def test_slos_follow_the_machine() -> None:
    rows = machine.scale_lengths(bursty(300), 450, 16383)
    slow = machine.limits_for(profile(decode_ms=40.0), rows, 2048)
    fast = machine.limits_for(profile(decode_ms=20.0), rows, 2048)
    assert slow.tau_ms > fast.tau_ms > 20 + 0.5 * machine.BUSY_DECODES
    longer = machine.limits_for(profile(prefill_ms=1.0), rows, 2048)
    assert longer.ttft_slo_ms > fast.ttft_slo_ms


def test_the_vocabulary_is_the_tokenizers_and_is_read_without_pytorch(
    tiny_model: Path,
) -> None:
    text = """
import sys
from pathlib import Path
from quickstart.load import Prompts
prompts = Prompts(Path(sys.argv[1]), 1)
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(*prompts._ids)
"""
    said = subprocess.run(
        [sys.executable, "-c", text, str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
        check=True,
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    size = min(len(tokenizer), tokenizer.vocab_size)
    wanted = sorted(set(range(size)) - set(tokenizer.all_special_ids))
    assert [int(word) for word in said.stdout.split()] == wanted


def test_no_two_prompts_share_a_prefix(tiny_model: Path) -> None:
    prompts = Prompts(tiny_model, seed=1)
    drawn = [prompts.draw(32) for _ in range(200)]
    assert all(len(prompt) == 32 for prompt in drawn)
    assert len({tuple(prompt[:8]) for prompt in drawn}) == 200
    assert min(min(prompt) for prompt in drawn) >= 6, "no special tokens"
    again = Prompts(tiny_model, seed=1)
    assert [again.draw(32) for _ in range(200)] == drawn


def quickstart(
    *words: str | Path, output: Path, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quickstart", "--output", output, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        **options,
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prefill", "0"], "--prefill is 0, expected at least 1"),
        (["--rate", "-1"], "--rate is -1.0, expected a number > 0"),
        (["--rate", "fast"], "--rate"),
        (["--policy", "kairos,best"], "--policy has 'best'"),
        (["--policy", "kairos,kairos"], "twice"),
        (["--requests", "2"], "--repetitions is 3"),
        (["--port", "80"], "--port is 80"),
        (["--model", "nowhere"], "--model nowhere: no config.json"),
        (["--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--profile", "nowhere.json"], "nowhere.json: No such file"),
        (["--what"], "--what"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    words: list[str], told: str, tmp_path: Path
) -> None:
    done = quickstart(*words, output=tmp_path / "out")
    assert done.returncode == 2
    assert told in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_bad_row_of_a_trace_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,5\n1,x,5\n")
    done = quickstart("--trace", trace, output=tmp_path / "out")
    assert done.returncode == 2
    assert "3" in done.stderr and "'x'" in done.stderr and done.stderr.count("\n") == 1


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if port > 60000:
            pytest.skip("the port drawn is above those the quick start takes")
        done = quickstart("--port", str(port), output=tmp_path / "out")
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr and done.stderr.count("\n") == 1


def test_a_server_and_its_children_end_when_stopped(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    server = Server(
        "sleeper",
        [sys.executable, "-c", script],
        "http://127.0.0.1:9",
        tmp_path / "log",
    )
    with server:
        deadline = time.monotonic() + 30
        while (
            not (child.exists() and child.read_text()) and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        pid = int(child.read_text())
        assert not server.is_ready()
    assert server.process.poll() is not None
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )
    server = Server(
        "stubborn",
        [sys.executable, "-c", script],
        "http://127.0.0.1:9",
        tmp_path / "log",
    )
    while not ready.exists():
        time.sleep(0.02)
    server.stop(patience_s=0.3)
    assert server.process.returncode == -signal.SIGKILL


def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    # One whose parent, outside the group, does not ask how it ended: so does the
    # first process of many a container with what an engine leaves behind.
    parent = tmp_path / "parent"
    script = (
        "import os, time\n"
        "group = os.getpgid(0)\n"
        "if os.fork() == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.setpgid(0, group)\n"
        "        os._exit(0)\n"
        "    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n"
        f"    open({str(parent)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    server = Server(
        "mother",
        [sys.executable, "-c", script],
        "http://127.0.0.1:9",
        tmp_path / "log",
    )
    while not (parent.exists() and parent.read_text()):
        time.sleep(0.02)
    try:
        started = time.monotonic()
        server.stop(patience_s=8.0)
        assert time.monotonic() - started < 4.0
        assert server.process.returncode == -signal.SIGTERM
    finally:
        os.kill(int(parent.read_text()), signal.SIGKILL)


def test_a_server_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server(
        "short",
        [sys.executable, "-c", "print('out of memory'); raise SystemExit(3)"],
        "http://127.0.0.1:9",
        tmp_path / "log",
    )
    with server, pytest.raises(StartError, match=r"ended with 3[^$]*out of memory"):
        wait_until_ready([server], 30.0)
