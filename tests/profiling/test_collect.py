# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from tests.profiling.stub_engine import StubEngine
from tests.profiling.synthetic import COLUMNS, TRUTH, step_rows, synthetic_steps
from vllm_kairos.cli import main
from vllm_kairos.files import UserError, load_profile
from vllm_kairos.profiling import collect, plan, run
from vllm_kairos.profiling.build import build_profile
from vllm_kairos.profiling.client import Served
from vllm_kairos.profiling.collect import Target, profile_engine
from vllm_kairos.profiling.fit import fit_steps
from vllm_kairos.profiling.session import LogTail, Session
from vllm_kairos.profiling.steps import read_steps


def _target(engine: StubEngine, tmp_path, budget_s: float = 9.0) -> Target:
    return Target(
        engine.url,
        engine.step_log,
        tmp_path / "out" / "stub.json",
        budget_s,
        hardware="stub",
        quiet=True,
    )


async def test_an_engine_is_measured_fitted_and_validated_within_its_budget(tmp_path):
    async with StubEngine(tmp_path / "log.csv", noise=0.02) as engine:
        started = asyncio.get_running_loop().time()
        profile = await profile_engine(_target(engine, tmp_path))
        took_s = asyncio.get_running_loop().time() - started
        assert not engine.requests  # Nothing is left running.
    assert took_s < 16.0
    assert load_profile(tmp_path / "out" / "stub.json") == profile
    assert (profile.model, profile.engine_version) == ("stub", "0.18.1")
    held_out = profile.provenance["held_out_trace"]
    assert held_out["decode"]["count"] > 20
    assert held_out["decode"]["mape_percent"] < 4.0
    model = profile.step_model()
    inside = [
        (model.step_ms(b, k, c, p), TRUTH.step_ms(b, k, c, p))
        for b in (1, 2, 4, 8, 16)
        for k in (100 * b, 500 * b)
        for c in (32, 128, 512)
        for p in (0, 512)
        if not model.estimate(b, k, c, p).extrapolated
    ]
    assert len(inside) > 20
    predicted, true = np.array(inside).T
    assert np.abs(predicted / true - 1).mean() < 0.05
    # The raw steps stay for the report, the session is over.
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["stub.json", "stub.steps.csv"]
    steps = read_steps([tmp_path / "out" / "stub.steps.csv"])
    # The grid ran chunks exactly: B decodes with chi - B prefill tokens.
    total = (steps.decodes + steps.prefill_tokens)[
        steps.is_mixed & (steps.prefills == 1)
    ]
    assert {64, 128}.issubset(total.tolist())


async def test_a_run_that_was_broken_off_resumes_where_it_stopped(
    tmp_path, monkeypatch
):
    async with StubEngine(tmp_path / "log.csv") as engine:
        ran: list[str] = []
        whole = run.Run._cell

        async def breaking(self, name, segment, work):
            if len(ran) == 6:
                raise KeyboardInterrupt
            if name not in self.session.done:
                ran.append(name)
            await whole(self, name, segment, work)

        monkeypatch.setattr(run.Run, "_cell", breaking)
        with pytest.raises(KeyboardInterrupt):
            await profile_engine(_target(engine, tmp_path))
        progress = json.loads((tmp_path / "out" / "stub.progress.json").read_text())
        assert progress["done"] == ran
        assert not (tmp_path / "out" / "stub.json").exists()
        first = list(ran)
        ran.clear()
        ran_limit_off = ["x"]  # Past the limit of six: never equal again.

        async def counting(self, name, segment, work):
            if name not in self.session.done:
                ran_limit_off.append(name)
            await whole(self, name, segment, work)

        monkeypatch.setattr(run.Run, "_cell", counting)
        profile = await profile_engine(_target(engine, tmp_path))
    assert not set(first) & set(ran_limit_off)
    assert profile.provenance["cells"] == len(first) + len(ran_limit_off) - 1


async def test_a_log_of_another_engine_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_FIRST_ROWS_S", 0.1)
    async with StubEngine(tmp_path / "log.csv") as engine:
        engine.logs = False
        with pytest.raises(UserError, match=r"no step was added.*its own step log"):
            await profile_engine(_target(engine, tmp_path))


async def test_what_an_engine_refuses_is_told_in_one_line(tmp_path):
    async with StubEngine(tmp_path / "log.csv") as engine:
        engine.refuse = True
        with pytest.raises(UserError, match=r"status 400.*not today") as caught:
            await profile_engine(_target(engine, tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "stub.json").exists()


async def test_nothing_at_the_url_is_told_in_one_line(tmp_path):
    target = Target("http://127.0.0.1:9", tmp_path / "log.csv", tmp_path / "p.json", 9)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9: does not answer"):
        await profile_engine(target)


def test_a_session_of_another_model_is_not_continued(tmp_path):
    session = Session(tmp_path / "p.json", {"model": "a"})
    session.finish_cell("x", "grid", [], 1.0)
    with pytest.raises(UserError, match="remove it to start anew"):
        Session(tmp_path / "p.json", {"model": "b"})


async def test_another_configuration_of_the_same_model_is_not_continued(
    tmp_path, monkeypatch
):
    async def broken(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Run, "everything", broken)
    async with StubEngine(tmp_path / "log.csv") as engine:
        first = _target(engine, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            await profile_engine(first)
        with pytest.raises(KeyboardInterrupt):  # The same resumes.
            await profile_engine(first)
        for change, told in (
            ({"serve_args": ["--dtype", "half"]}, "serve_args.*'half'"),
            ({"hardware": "another"}, "hardware 'stub', not 'another'"),
            ({"tensor_parallel": 2}, "tensor_parallel 1, not 2"),
            ({"lengths": [(5, 5)]}, "trace "),
        ):
            other = dataclasses.replace(first, **change)
            with pytest.raises(UserError, match=told):
                await profile_engine(other)


@pytest.mark.parametrize(
    "state", [{}, {"done": ["x"]}, {"done": 3, "spent_s": 1, "rows": 2}]
)
def test_a_session_without_its_fields_is_told_in_one_line(tmp_path, state):
    session = Session(tmp_path / "p.json", {"model": "a"})
    raw = json.loads(session.progress_path.read_text())
    kept = {name: raw[name] for name in ("format", "key")}
    session.progress_path.write_text(json.dumps({**kept, **state}))
    with pytest.raises(UserError, match=r"p\.progress\.json.*missing or wrong"):
        Session(tmp_path / "p.json", {"model": "a"})


def test_rows_of_a_cell_cut_off_are_not_kept_twice(tmp_path):
    row = dict.fromkeys(("step", "time_s", "latency_ms"), "1")
    session = Session(tmp_path / "p.json", {"model": "a"})
    session.finish_cell("x", "grid", [row], 1.0)
    with session.steps_path.open("a") as file:
        file.write("profiled,2,half a r")
    again = Session(tmp_path / "p.json", {"model": "a"})
    assert again.done == ["x"]
    assert again.segments() == ["grid"]


def test_a_session_file_that_is_broken_is_named(tmp_path):
    (tmp_path / "p.progress.json").write_text("{")
    with pytest.raises(UserError, match=r"p\.progress\.json"):
        Session(tmp_path / "p.json", {"model": "a"})


def test_the_tail_gives_each_row_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "log.csv"
    header = (
        "step,sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,"
        "num_decode_requests,sum_decode_kv_tokens,latency_ms\n"
    )
    path.write_text(header + "1,0,0,0,1,10,5.0\n")
    tail = LogTail(path)
    assert tail.new_rows() == []
    with path.open("a") as file:
        file.write("2,0,0,0,1,11,5.")
    assert tail.new_rows() == []
    with path.open("a") as file:
        file.write("5\n")
    assert [row["latency_ms"] for row in tail.new_rows()] == ["5.5"]
    assert tail.new_rows() == []


def _served() -> Served:
    return Served("stub", "/nowhere/stub", 4096, "0.18.1", 65_536, 16)


def test_what_is_held_out_is_tested_on_and_not_fitted(tmp_path):
    fitted = synthetic_steps(900, noise=0.02)
    held_out = synthetic_steps(300, noise=0.02, seed=2)
    held_out.latency_ms[:] *= 2.0
    session = Session(tmp_path / "p.json", {})
    for segment, steps, first in (
        ("grid", fitted, 0),
        ("held-out-0.8", held_out, 1000),
    ):
        rows = [
            dict(zip(COLUMNS.split(","), row.split(","), strict=True))
            for row in step_rows(steps)
        ]
        for number, row in enumerate(rows, start=first):
            row["step"] = str(number)
        session.finish_cell(segment, segment, rows, 1.0)
    target = Target("http://u", "log.csv", tmp_path / "p.json", 60.0, hardware="h")
    profile = collect._finish(target, _served(), None, session, None, "")
    for phase in ("prefill", "decode", "mixed"):
        assert getattr(profile, phase).steps == int(fitted.phase(phase).sum())
        error = profile.provenance["held_out_trace"][phase]
        assert error["count"] == int(held_out.phase(phase).sum())
        assert error["bias_percent"] == pytest.approx(-50.0, abs=1.5)


async def test_replays_have_several_rates_and_the_lengths_of_the_trace(tmp_path):
    lengths = [(100, 7), (200, 9)]
    (tmp_path / "log.csv").write_text(COLUMNS + "\n")
    target = Target(
        "http://u", tmp_path / "log.csv", tmp_path / "p.json", 60.0, lengths=lengths
    )
    session = Session(target.output, {})
    one = run.Run(target, None, plan.Bounds(4096, 65_536, 32), session)
    cells = []

    async def keep(name, segment, work):
        cells.append((segment, work.args[1], work.args[2]))

    one._cell = keep
    await one._replay(1, 1.0, last=True)
    rates: dict[str, float] = {}
    for segment, requests, duration_s in cells:
        assert {(r.prompt_tokens, r.output_tokens) for r in requests} <= set(lengths)
        load = segment.rpartition("-")[2]
        rates[load] = rates.get(load, 0.0) + len(requests) / duration_s
    kinds = {segment.rpartition("-")[0] for segment, *_ in cells}
    assert kinds == {"replay", "held-out"}
    assert set(rates) == {f"{load:g}" for load in plan.LOADS}
    ordered = [rates[f"{load:g}"] for load in sorted(plan.LOADS)]
    assert len(ordered) > 1
    assert ordered[-1] > 1.5 * ordered[0]


@pytest.mark.parametrize(
    ("words", "budget_s"), [([], 1800.0), (["--budget", "90s"], 90.0)]
)
def test_the_command_measures_for_half_an_hour_with_the_lengths_of_the_trace(
    tmp_path, monkeypatch, capsys, words, budget_s
):
    trace = tmp_path / "t.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n100,7\n200,9\n")
    targets = []

    async def measured(target):
        targets.append(target)
        return build_profile(
            fit_steps(synthetic_steps(300)),
            name="t",
            model="m",
            hardware="h",
            engine_version="v",
        )

    monkeypatch.setattr(collect, "profile_engine", measured)
    command = ["profile", "--url", "http://u", "--step-log", "log.csv"]
    command += ["--output", str(tmp_path / "p.json"), "--trace", str(trace), *words]
    assert main(command) == 0
    assert targets[0].budget_s == budget_s
    assert list(targets[0].lengths) == [(100, 7), (200, 9)]
    assert "MAPE" in capsys.readouterr().out
