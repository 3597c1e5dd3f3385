# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_kairos.files import UserError
from vllm_kairos.profiling import serve, trace


async def test_an_engine_that_dies_at_once_is_told_in_one_line(tmp_path, monkeypatch):
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho 'ValueError: no such model'\nexit 3\n")
    false.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(false))
    log = tmp_path / "engine.log"
    with pytest.raises(
        UserError, match=r"status 3.*no such model.*engine\.log"
    ) as caught:
        async with serve.serving("m", [], tmp_path / "steps.csv", log):
            pytest.fail("an engine that is dead was yielded")
    assert "\n" not in str(caught.value)


async def test_arguments_after_the_dashes_reach_the_engine(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    words = tmp_path / "words"
    fake.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {words}.new\nmv {words}.new {words}\n'
        "exec sleep 600\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(serve, "_STOP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(serve, "_healthy", lambda _: words.exists())
    extra = ["--dtype", "half", "--max-model-len=2048"]
    log = tmp_path / "s.csv"
    async with serve.serving("some/model", extra, log, tmp_path / "log") as started:
        told = words.read_text().splitlines()
    assert told[told.index("serve") + 1] == "some/model"
    assert told[-3:] == extra
    settings = json.loads(told[told.index("--additional-config") + 1])["kairos"]
    assert settings["step_log"] == str(started.step_log) == str(log)


async def test_an_engine_and_its_workers_are_stopped_when_the_block_fails(
    tmp_path, monkeypatch
):
    # A server that starts a worker, as vLLM does, and ignores SIGTERM.
    fake = tmp_path / "python"
    pids = tmp_path / "pids"
    fake.write_text(
        f"#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho $! $$ > {pids}\nwait\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(serve, "_STOP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(serve, "_healthy", lambda _: pids.exists())
    with pytest.raises(KeyboardInterrupt):
        async with serve.serving("m", [], tmp_path / "s.csv", tmp_path / "log"):
            raise KeyboardInterrupt
    for pid in pids.read_text().split():
        for _ in range(50):
            if not _runs(int(pid)):
                break
            time.sleep(0.1)
        assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def test_a_cpu_build_gets_what_its_worker_asks_for(monkeypatch):
    monkeypatch.setattr(serve, "_is_cpu_build", lambda: True)
    monkeypatch.setattr(serve, "_tcmalloc", lambda: Path("/l/libtcmalloc.so"))
    monkeypatch.setattr(serve, "_iomp5", lambda: Path("/l/libiomp5.so"))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("LD_PRELOAD", "/mine/libtcmalloc_minimal.so.4")
    variables = serve.engine_environment()
    assert variables["LD_PRELOAD"] == "/l/libiomp5.so:/mine/libtcmalloc_minimal.so.4"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setattr(serve, "_is_cpu_build", lambda: False)
    assert serve.engine_environment()["LD_PRELOAD"] == "/mine/libtcmalloc_minimal.so.4"


def test_a_trace_with_a_bad_row_names_row_and_field(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,0\n1,200,7\n")
    assert trace.read_lengths(path) == [(100, 0), (200, 7)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,5\n1,,7\n")
    with pytest.raises(UserError, match=r"row 3: ContextTokens is ''"):
        trace.read_lengths(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="num_prefill_tokens"):
        trace.read_lengths(path)


def test_the_step_recorder_costs_under_one_percent_of_a_step(tmp_path):
    recorder = pytest.importorskip("vllm_kairos.engine.recorder")
    log = recorder.StepLog(str(tmp_path / "log.csv"), "e")
    count = 20_000
    best_us = float("inf")
    for _ in range(3):
        started = time.process_time()
        records = [
            recorder.StepRecord(i, 1.7e9, 512, 1, 0, 8, 9000, 20.5)
            for i in range(count)
        ]
        for at in range(0, count, 10):  # One flush a heartbeat of ten steps.
            log.write(records[at : at + 10])
        best_us = min(best_us, 1e6 * (time.process_time() - started) / count)
    log.close()
    # One percent of a fast decode step, 5 ms.
    assert best_us < 50.0, best_us


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_command_leaves_no_process_and_no_profile(tmp_path, number):
    (tmp_path / "out").mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from vllm_kairos.cli import main\n"
            "from vllm_kairos.profiling import serve\n"
            "sys.executable = sys.argv[1]\n"
            "serve._healthy = lambda _: False\n"
            "sys.exit(main(['profile', '--model', 'm', '--output', sys.argv[2]]))\n",
            _sleeper(tmp_path),
            str(tmp_path / "out" / "p.json"),
        ],
        stderr=subprocess.DEVNULL,
        # A shell's background job is born deaf to Ctrl-C, and so are its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid_file = tmp_path / "pid"
    for _ in range(300):
        if pid_file.exists() and pid_file.read_text().strip():
            break
        time.sleep(0.1)
    engine = int(pid_file.read_text())
    assert _runs(engine)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    for _ in range(50):
        if not _runs(engine):
            break
        time.sleep(0.1)
    assert not _runs(engine)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["p.engine.log"]


def _sleeper(folder: Path) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho $$ > {folder / 'pid'}\nexec sleep 600\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_server_and_profiler_leave_a_bound_engine_its_core(tmp_path, monkeypatch):
    cores = os.sched_getaffinity(0)
    engine_core = max(cores)
    fake = tmp_path / "python"
    pids = tmp_path / "pids"
    fake.write_text(
        f"#!/bin/sh\ntaskset -c {engine_core} sleep 600 &\n"
        f"sleep 0.2; echo $! $$ > {pids}\nwait\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(serve, "_STOP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(serve, "_healthy", lambda _: pids.exists())
    async with serve.serving("m", [], tmp_path / "s.csv", tmp_path / "log"):
        engine, server = map(int, pids.read_text().split())
        assert os.sched_getaffinity(engine) == {engine_core}
        assert os.sched_getaffinity(server) == cores - {engine_core}
        assert os.sched_getaffinity(0) == cores - {engine_core}
    assert os.sched_getaffinity(0) == cores
