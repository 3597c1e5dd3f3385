# SPDX-License-Identifier: Apache-2.0
"""`vllm-kairos proxy` and the patched bundled script as processes."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.stubs import MODEL, StubEngine, profile, report, until
from vllm_kairos import cli, patching
from vllm_kairos.core.messages import parse_schedule
from vllm_kairos.core.policies import policies
from vllm_kairos.files import UserError, save_profile
from vllm_kairos.proxy.flags import (
    add_arguments,
    add_node_arguments,
    settings_from_args,
)

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/online_serving/disaggregated_serving/disagg_proxy_demo.py"
PROMPT = {"prompt": list(range(1, 401)), "max_tokens": 8}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The bundled script with patch 0003, from vLLM's source tree."""
    where = os.environ.get("KAIROS_VLLM_SOURCE", f"{sys.prefix}/source")
    source = Path(where) / SCRIPT
    if not source.exists():
        pytest.skip(f"no vLLM source tree at {where} (ci/setup_env.sh makes it)")
    target = tmp_path / "vllm-tree" / SCRIPT
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    if "vllm_kairos" not in target.read_text():
        shutil.copy(Path(where) / "PKG-INFO", tmp_path / "vllm-tree")
        patching.apply(tmp_path / "vllm-tree")
    return target


@asynccontextmanager
async def process(
    *words: object, path: str = str(ROOT)
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of our own; it must end by itself on SIGTERM."""
    run = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, words),
        env={**os.environ, "PYTHONPATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield run
    finally:
        if run.returncode is None:
            run.send_signal(signal.SIGTERM)
        await asyncio.wait_for(run.communicate(), 20)


async def answers(url: str, run: asyncio.subprocess.Process) -> None:
    """Wait until a server answers."""
    async with aiohttp.ClientSession() as client:
        for _ in range(1200):
            assert run.returncode is None, (await run.communicate())[0].decode()
            try:
                async with client.get(f"{url}/status") as answer:
                    assert answer.status == 200
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    raise AssertionError("no answer in 60 s")


def node_flags(engines: list[StubEngine], port: int) -> list[object]:
    return [
        *("--model", "anywhere/tiny", "--prefill", engines[0].address),
        *("--decode", engines[2].address, "--port", port),
    ]


def kairos_flags(engines: list[StubEngine], path: Path) -> list[object]:
    save_profile(path, profile())
    engines[0].state = report(prefills=[(4000, 0)])
    engines[2].state = report(decodes=1)
    return [
        *("--scheduling-policy", "kairos", "--profile", path, "--tau-ms", "50"),
        *("--engine-state", engines[0].state_address, engines[2].state_address),
        *("--tokenizer", "none"),
    ]


async def deflects(url: str, engines: list[StubEngine]) -> None:
    """Post until the proxy has state, which takes a heartbeat."""
    async with aiohttp.ClientSession() as client:
        for _ in range(100):
            async with client.post(f"{url}/v1/completions", json=PROMPT) as answer:
                assert answer.status == 200
                if answer.headers["x-kairos-route"] == "deflected":
                    break
            await asyncio.sleep(0.02)
        body = engines[2].bodies()[-1]
        schedule = parse_schedule(body["kv_transfer_params"])
        assert schedule is not None and schedule.chunks == (351, 51)
        for path in ("/metrics", "/v1/models", "/health", "/kairos/status"):
            async with client.get(f"{url}{path}") as answer:
                assert answer.status == 200, path


async def test_the_command_deflects(engines: list[StubEngine], tmp_path: Path) -> None:
    port = free_port()
    flags = [*node_flags(engines, port), *kairos_flags(engines, tmp_path / "p.json")]
    async with process("-m", "vllm_kairos.cli", "proxy", *flags) as run:
        await answers(f"http://127.0.0.1:{port}", run)
        await deflects(f"http://127.0.0.1:{port}", engines)
    # As every other command.
    assert run.returncode == 128 + signal.SIGTERM


async def stream_then(
    stub: StubEngine, request: web.Request, pause_s: float
) -> web.StreamResponse:
    """A stream whose end comes a while after its first event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(stub.chunks[0])
    await asyncio.sleep(pause_s)
    for chunk in stub.chunks[1:]:
        await response.write(chunk)
    return response


@pytest.mark.parametrize("pause_s", [0.5, 600.0])
async def test_a_stop_waits_for_a_stream_but_not_for_a_hung_one(
    engines: list[StubEngine], pause_s: float
) -> None:
    stub, port = engines[2], free_port()
    stub.behaviour = lambda request, _: stream_then(stub, request, pause_s)
    flags = [*node_flags(engines, port), "--tokenizer", "none", "--stop-grace-s", 1]
    url = f"http://127.0.0.1:{port}"
    async with process("-m", "vllm_kairos.cli", "proxy", *flags) as run:
        await answers(url, run)
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"{url}/v1/completions", json={**PROMPT, "stream": True}
            ) as answer,
        ):
            assert await answer.content.readany() == stub.chunks[0]
            stopped_s = time.monotonic()
            run.send_signal(signal.SIGTERM)
            if pause_s < 1.0:
                assert await answer.content.read() == b"".join(stub.chunks[1:])
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.content.read()
                assert time.monotonic() - stopped_s >= 1.0
            out, _ = await asyncio.wait_for(run.communicate(), 10)
    assert time.monotonic() - stopped_s < 4.0
    assert run.returncode == 128 + signal.SIGTERM
    assert out.decode().splitlines()[-1] == "vllm-kairos proxy: terminated"
    assert "Traceback" not in out.decode(), out.decode()
    # The engine is told: nobody reads the rest.
    await until(lambda: stub.cancelled == (pause_s > 1.0))


async def test_the_patched_script_deflects(
    script: Path, engines: list[StubEngine], tmp_path: Path
) -> None:
    port = free_port()
    flags = [*node_flags(engines, port), *kairos_flags(engines, tmp_path / "p.json")]
    async with process(script, *flags) as run:
        await answers(f"http://127.0.0.1:{port}", run)
        await deflects(f"http://127.0.0.1:{port}", engines)


@pytest.mark.parametrize("with_kairos", [True, False])
async def test_the_patched_script_is_as_before_without_our_flags(
    script: Path, engines: list[StubEngine], with_kairos: bool
) -> None:
    port = free_port()
    words = node_flags(engines, port)
    # An interpreter that cannot import vllm_kairos: a broken one stands first.
    path = str(ROOT)
    if not with_kairos:
        broken = script.parent / "broken" / "vllm_kairos"
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text("raise ImportError('not installed')\n")
        path = str(broken.parent)
    async with process(script, *words, path=path) as run:
        await answers(f"http://127.0.0.1:{port}", run)
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"http://127.0.0.1:{port}/v1/completions", json=PROMPT
            ) as answer,
        ):
            assert answer.status == 200
            assert "x-kairos-route" not in answer.headers
            assert (await answer.json(content_type=None))["from"] == engines[2].address
    assert engines[0].bodies() == [{**PROMPT, "max_tokens": 1}]
    assert engines[2].bodies() == [PROMPT]


async def test_round_robin_with_a_handshake_moves_kv_in_the_patched_script(
    script: Path, engines: list[StubEngine]
) -> None:
    port = free_port()
    words = [*node_flags(engines, port), "--kv-handshake", "nixl", "--tokenizer=none"]
    async with process(script, *words) as run:
        await answers(f"http://127.0.0.1:{port}", run)
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"http://127.0.0.1:{port}/v1/completions", json=PROMPT
            ) as answer,
        ):
            assert answer.headers["x-kairos-route"] == "kept"
    assert engines[0].bodies()[0]["kv_transfer_params"]["do_remote_decode"]
    assert engines[2].bodies()[0]["kv_transfer_params"] == engines[0].kv


async def test_the_patched_script_says_in_one_line_what_is_wrong(
    script: Path, engines: list[StubEngine], tmp_path: Path
) -> None:
    words = node_flags(engines, free_port())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, told in (
            (["--scheduling-policy", "kairo"], "kairo"),
            (["--scheduling-policy", "kairos", "--beta", "2"], "--beta"),
            (["--scheduling-policy", "kairos", "--port", port], f"--port {port}"),
            (["--scheduling-policy", "kairos", "--model", "x"], "different model"),
        ):
            async with process(script, *words, *flags) as run:
                out, _ = await run.communicate()
            assert run.returncode == 2, out
            lines = [x for x in out.decode().splitlines() if "error:" in x]
            assert len(lines) == 1 and told in lines[0], out.decode()
            assert "Traceback" not in out.decode()


BAD = {
    "no decode node": ([], "--decode"),
    "node": (["--decode", "localhost"], "'localhost'"),
    "node port": (["--decode", "h:99999"], "'h:99999'"),
    "node with a path": (["--decode", "h:1/x@y:2"], "h:1/x@y:2"),
    "twice": (["--decode", "h:1", "h:1"], "twice"),
    "port": (["--decode", "h:1", "--port", "70000"], "--port is 70000"),
    "tau": (["--decode", "h:1", "--tau-ms", "0"], "--tau-ms"),
    "tau nan": (["--decode", "h:1", "--tau-ms", "nan"], "--tau-ms"),
    "beta": (["--decode", "h:1", "--beta", "1.5"], "--beta"),
    "alpha": (["--decode", "h:1", "--alpha", "-1"], "--alpha"),
    "slo": (["--decode", "h:1", "--ttft-slo-ms", "inf"], "--ttft-slo-ms"),
    "chunks": (["--decode", "h:1", "--chunk-candidates", "0"], "--chunk-candidates"),
    "age": (["--decode", "h:1", "--state-max-age-ms", "0"], "--state-max-age-ms"),
    "grace": (["--decode", "h:1", "--stop-grace-s", "-1"], "--stop-grace-s is -1"),
    "policy": (["--decode", "h:1", "--scheduling-policy", "x"], "'x'"),
    "policy, all known": (
        ["--decode", "h:1", "--scheduling-policy", "foo"],
        "ppd, round_robin, sarathi",
    ),
    "option": (["--decode", "h:1", "--policy-option", "x"], "--policy-option"),
    "unknown option": (["--decode", "h:1", "--policy-option", "x=1"], "'x'"),
    "option value": (
        ["--decode", "h:1", "--policy-option", "balance=up"],
        "balance is 'up'",
    ),
    "states": (["--decode", "h:1", "--engine-state", "tcp://a:1"], "1 addresses"),
    "state": (["--decode", "h:1", "--engine-state", "h:1=http://a"], "http://a"),
    "state of": (["--decode", "h:1", "--engine-state", "h:9=tcp://a:1"], "'h:9'"),
    "profile": (["--decode", "h:1", "--profile", "/none.json"], "/none.json"),
    "profile of": (["--decode", "h:1", "--profile", "h:9=/none.json"], "'h:9'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_told_in_one_line_with_exit_code_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, told = BAD[name]
    words = ["proxy", "--model", "m", "--prefill", "p:1", *flags]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told in err


#: Numbers and switches of every policy, each with a value that is none.
BAD_OPTIONS = [
    (name, option)
    for name, known in sorted(policies().items())
    for option, parameter in list(inspect.signature(known.__init__).parameters.items())[
        2:
    ]
    if parameter.annotation in ("int", "float", "bool")
]


@pytest.mark.parametrize(("policy", "option"), BAD_OPTIONS)
def test_an_option_of_any_policy_that_is_no_number_is_told_in_one_line(
    policy: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = ["proxy", "--model", "m", "--prefill", "p:1", "--decode", "d:1"]
    proxy += ["--scheduling-policy", policy, "--policy-option", f"{option}=abc"]
    for words in (proxy, ["simulate", "--policy", f"{policy}:{option}=abc"]):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"{option} is 'abc'" in err


def test_a_profile_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(tmp_path / "p.json", profile(model="org/other"))
    words = ["proxy", "--model", "org/tiny", "--prefill", "p:1", "--decode", "d:1"]
    assert cli.main([*words, "--profile", str(tmp_path / "p.json")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "org/other" in err and "'tiny'" in err


def test_a_port_in_use_is_told_in_one_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["proxy", "-m", "m", "-p", "127.0.0.1:1", "-d", "127.0.0.1:2"]
        assert cli.main([*words, "--port", port]) == 2
    err = capsys.readouterr().err.splitlines()
    # Not a word of the nodes, which do not answer either.
    assert len(err) == 1 and "error:" in err[0] and port in err[0]


async def test_a_node_that_serves_another_model_is_refused(
    engines: list[StubEngine],
) -> None:
    words = node_flags(engines, free_port())
    words[1] = "other"
    async with process("-m", "vllm_kairos.cli", "proxy", *words) as run:
        out, _ = await run.communicate()
    assert run.returncode == 2
    last = out.decode().splitlines()[-1]
    assert re.search(rf"serves '{MODEL}'.*'other'", last), last


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    add_arguments(parser)
    return parser.parse_args(["-m", "m", "-p", "a:1", "b:2", "-d", "c:3", *words])


def test_states_and_profiles_may_be_given_in_order_or_by_node(tmp_path: Path) -> None:
    save_profile(tmp_path / "p=1.json", profile(model="m"))
    path = str(tmp_path / "p=1.json")
    s = settings_from_args(
        parse("--engine-state", "tcp://x:1", "tcp://y:2", "ipc:///z")
    )
    assert s.engine_state == {"a:1": "tcp://x:1", "b:2": "tcp://y:2", "c:3": "ipc:///z"}
    s = settings_from_args(parse("--engine-state", "c:3=tcp://[::1]:5"))
    assert s.engine_state == {"c:3": "tcp://[::1]:5"}
    assert set(settings_from_args(parse("--profile", path)).profiles) == {
        *("a:1", "b:2", "c:3"),
    }
    assert set(settings_from_args(parse("--profile", f"c:3={path}")).profiles) == {
        "c:3"
    }
    with pytest.raises(UserError, match="like the others"):
        settings_from_args(parse("--profile", path, f"c:3={path}"))


def test_defaults_are_the_papers_and_the_bundled_scripts() -> None:
    args = parse()
    assert (args.host, args.port) == ("127.0.0.1", 8000)
    s = settings_from_args(args)
    assert (s.policy, s.handshake) == ("disagg", True)
    assert (s.slo.tau_ms, s.slo.alpha, s.slo.beta) == (70.0, 1.3, 0.9)
    assert s.slo.candidates == (2048, 1024, 512, 256, 128)
    assert settings_from_args(parse("--kv-handshake", "none")).handshake is False


def test_options_reach_the_policy_with_their_types() -> None:
    flags = ("--scheduling-policy", "kairos-paper")
    s = settings_from_args(parse(*flags, "--policy-option", "literal_progress=false"))
    assert s.policy_options == {"literal_progress": False}
    assert s.make_policy().literal_progress is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("option", "setting"), [("chunks=planned", "mode"), ("feedback=false", "feedback")]
)
def test_what_only_an_engine_can_leave_out_is_refused_with_its_setting(
    option: str, setting: str
) -> None:
    with pytest.raises(UserError, match=f"expected '{setting}' in their"):
        settings_from_args(parse(*KAIROS, "--policy-option", option))


KAIROS = ("--prefill", "h:1", "--decode", "h:2", "--scheduling-policy", "kairos")


def test_kairos_binds_late_unless_told_otherwise() -> None:
    assert settings_from_args(parse(*KAIROS)).make_policy().late
    assert settings_from_args(parse(*KAIROS, "--dispatch", "late")).make_policy().late
    eager = settings_from_args(parse(*KAIROS, "--dispatch", "eager"))
    assert not eager.make_policy().late
    paper = parse(*KAIROS[:-1], "kairos-paper", "--dispatch", "eager")
    assert not settings_from_args(paper).make_policy().late


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((*KAIROS[:-1], "kairos-paper", "--dispatch", "late"), "'dispatch'"),
        (
            (*KAIROS, "--dispatch", "late", "--policy-option", "dispatch=eager"),
            "--dispatch",
        ),
    ],
)
def test_a_dispatch_that_cannot_be_is_refused(
    flags: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        settings_from_args(parse(*flags))
