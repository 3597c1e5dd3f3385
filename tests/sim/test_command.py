# SPDX-License-Identifier: Apache-2.0
"""`vllm-kairos simulate` and `vllm-kairos paper` from the outside."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from vllm_kairos.cli import main
from vllm_kairos.core.policies.kairos import PARTS
from vllm_kairos.sim import output, paper_lab
from vllm_kairos.sim.paper_sections import spread

FAST = ["--requests", "60", "--no-progress", "--jobs", "1"]


def simulate(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "out"
    assert main(["simulate", *FAST, "--output", str(out), *words]) == 0
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def rows_of(tmp_path: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (tmp_path / "out" / "requests.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [r for r in rows if all(r[k] == v for k, v in key.items())]


def test_every_number_of_the_summary_follows_from_the_rows(tmp_path: Path) -> None:
    policies = ["disagg", "kairos-paper", "mooncake:ttft_slo_ms=900"]
    summary = simulate(
        tmp_path, "--rate", "8", "20", "--seeds", "1..2", "--policy", *policies
    )
    assert len(summary["runs"]) == 12
    for run in summary["runs"]:
        rows = rows_of(tmp_path, {k: run[k] for k in ("policy", "rate", "seed")})
        served = [r for r in rows if not r["rejected"]]
        assert run["requests"] == len(rows) == 60
        assert run["rejected"] == 60 - len(served)
        assert run["deflections"] == sum(r["deflected"] for r in rows)
        ttft = [r["ttft_ms"] for r in served]
        gaps = [g for r in served for g in r["tbt_ms"]]
        for name, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
            assert run["ttft_ms"][name] == pytest.approx(np.percentile(ttft, q))
            assert run["tbt_ms"][name] == pytest.approx(np.percentile(gaps, q))
        assert run["tbt_over_slo_share"] == pytest.approx(np.mean(np.array(gaps) > 70))
        met = [
            r["ttft_ms"] <= 4000
            and (not r["tbt_ms"] or np.percentile(r["tbt_ms"], 95) <= 70)
            for r in served
        ]
        assert run["slo_attainment"] == pytest.approx(sum(met) / 60)
        first = min(r["arrival_ms"] for r in rows)
        last = max(r["arrival_ms"] + r["ttft_ms"] + sum(r["tbt_ms"]) for r in served)
        outputs = sum(r["output_tokens"] for r in served)
        assert run["output_tokens_per_s"] == pytest.approx(
            outputs / (last - first) * 1e3, rel=1e-6
        )
        for part in ("prefill_queue", "prefill", "transfer", "decode_queue"):
            values = [r[f"{part}_ms"] for r in served]
            assert run["ttft_parts_ms_p95"][part] == pytest.approx(
                np.percentile(values, 95)
            )
        for r in served:
            parts = ("prefill_queue", "prefill", "transfer", "decode_queue")
            assert round(sum(r[f"{p}_ms"] for p in parts), 3) == r["ttft_ms"]
            assert 1 + len(r["tbt_ms"]) == r["output_tokens"]
    assert any(run["rejected"] for run in summary["runs"])
    assert any(run["deflections"] for run in summary["runs"])


def test_the_number_of_workers_changes_no_number(tmp_path: Path) -> None:
    words = ["--rate", "6", "9", "--seeds", "1..3"]
    words += ["--policy", "disagg", "kairos-paper"]
    alone = simulate(tmp_path / "a", *words, "--model-noise", "0.03")
    many = simulate(tmp_path / "b", *words, "--model-noise", "0.03", "--jobs", "2")
    assert alone == many
    rows = [(tmp_path / d / "out" / "requests.jsonl").read_bytes() for d in "ab"]
    assert rows[0] == rows[1]


def test_results_carry_seed_cv_profile_and_settings(tmp_path: Path) -> None:
    summary = simulate(
        tmp_path, "--policy", "kairos-paper:alpha=1.1", "--cv", "1.7", "--beta", "0.95"
    )
    assert summary["cv"] == 1.7
    assert summary["seeds"] == [1]
    assert summary["profile"]["name"] == "a100-deepseek-v2-lite"
    assert summary["settings"]["beta"] == 0.95
    assert summary["policies"]["kairos-paper:alpha=1.1"]["alpha"] == 1.1
    assert (tmp_path / "out" / "latency.png").stat().st_size > 5000


def test_a_trace_keeps_its_arrivals_or_takes_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = "".join(f"{i * 0.5},{500 + i},3\n" for i in range(30))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    base = ["--workload", str(trace), "--policy", "disagg", "--requests", "30"]
    simulate(tmp_path, *base)
    own = rows_of(tmp_path, {})
    assert [r["arrival_ms"] for r in own] == [i * 500.0 for i in range(30)]
    simulate(tmp_path, *base, "--rate", "4")
    fast = rows_of(tmp_path, {})
    assert fast[-1]["arrival_ms"] == pytest.approx(29 / 4 * 1e3, abs=1)


def test_prefix_hits_of_a_trace_with_hashes_shorten_prefill(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": at, "input_length": 512 * n, "output_length": 3, "hash_ids": ids}
        for at, n in ((0, 8), (60_000, 9))
        for ids in [list(range(n))]
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--workload", str(trace), "--prefill", "1", "--decode", "1"]
    simulate(tmp_path, *words, "--requests", "2", "--policy", "disagg")
    first, second = rows_of(tmp_path, {})
    assert second["prefill_ms"] < 0.3 * first["prefill_ms"]
    # The decode node has the prefix too: only the new blocks cross the link.
    assert second["transfer_ms"] < 0.3 * first["transfer_ms"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "0"], "--rate 0: expected a number > 0"),
        (["--rate", "-3"], "--rate -3: expected a number > 0"),
        (["--rate", "fast"], "--rate fast: expected numbers, or A..B"),
        (["--rate", "9..6"], "--rate 9..6: expected A <= B"),
        (["--seeds", "1.5"], "--seeds 1.5: expected whole numbers"),
        (["--policy", "kairso"], "the nearest are: kairos"),
        (["--policy", "sq:thta=4"], "has no setting 'thta', the nearest are: theta"),
        (["--policy", "sq:alpha=1.1"], "policy 'sq' has no setting 'alpha'"),
        (
            ["--policy", "disagg", "sq", "--alpha", "1.3"],
            "--alpha is not used with --policy disagg sq, expected it left out",
        ),
        (["--policy", "oracle", "--alpha", "1.1"], "--alpha is not used with --policy"),
        (
            ["--policy", "disagg", "kairos:beta=0.8", "--beta", "0.9"],
            "--beta is not used with --policy disagg kairos:beta=0.8",
        ),
        (["--policy", "sq:theta"], "'theta' is not of the form key=value"),
        (["--policy", "sq:theta=many"], "theta is 'many', expected a number"),
        (["--policy", "dynamo:rule=isl"], "expected one of isl_bounding, prefill_load"),
        (["--workload", "bursti"], "unknown workload 'bursti'"),
        (["--requests", "0"], "--requests 0: expected a whole number >= 1"),
        (["--cv", "-1"], "--cv -1.0: expected a number >= 0"),
        (["--prefill", "0"], "--prefill 0: expected a number >= 1"),
        (["--link-gb-per-s", "0"], "--link-gb-per-s 0.0: expected a number > 0"),
        (["--beta", "2"], "beta is 2.0, expected 0 < beta <= 1"),
        (
            ["--budget-tokens", "1"],
            "--budget-tokens 1: expected a number >= 256, --max",
        ),
        (
            ["--max-num-seqs", "9000"],
            "--budget-tokens 8192: expected a number >= 9000, --max-num-seqs, as vLLM",
        ),
        (["--kv-tokens", "1000"], "are more than the 992 KV tokens of a node"),
        (["--profile", "h100"], "no such file, and not one of the shipped profiles"),
        (["--jobs", "0"], "--jobs 0: expected a whole number >= 1"),
        (["--ablate", "--policy", "sq"], "--policy is not used with --ablate"),
        (["--capacity", "--rate", "9"], "--rate is not used with --capacity"),
        (["--rate", "6..9", "--plan"], "--rate is not used with --plan"),
        (["--arrivals", "poisson", "--cv", "2"], "--cv is not used with --arrivals po"),
        (["--cv", "1.3", "--arrivals", "own"], "--cv is not used with --arrivals own"),
        (["--ablate", "--tau-ms", "1"], "kairos meets the SLOs at no rate"),
        (["--policy", "sq", "disagg", "sq"], "--policy sq: given twice"),
        (["--rate", "8", "6..9"], "--rate 8: given twice"),
        (["--rate", ","], "--rate ,: expected numbers, there are none"),
        (["--rate", "1..1e12"], "--rate 1..1e12: expected at most 10000 numbers"),
        (["--rate", "1e300"], "--rate 1e+300: expected a number from 1e-6 to 1e6"),
        (["--seeds", "1..3", "2"], "--seeds 2: given twice"),
        (["--seeds", "99999999999999999999"], "whole numbers >= 0 (and <= 2^53)"),
        (["--cv", "1e200"], "--cv 1e+200: expected a number <= 100"),
        (["--cv", "nan"], "--cv nan: expected a number >= 0"),
        (
            ["--prefill", "100000000"],
            "--prefill 100000000: expected a number <= 10,000",
        ),
        (["--model-noise", "1e300"], "--model-noise 1e+300: expected a number <= 5"),
        (["--requests", "9" * 20], "expected a whole number <= 10,000,000"),
        (["--output", ""], "--output is empty, expected a directory"),
        (["--link-gb-per-s", "1e-300"], "an hour passes without an arrival or a token"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["simulate", *FAST, "--output", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not out.exists() or not any(out.iterdir())


def test_a_bad_trace_row_is_told_by_line_and_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,0\n")
    assert main(["simulate", *FAST, "--workload", str(trace)]) == 2
    assert "t.csv:2: num_decode_tokens is '0'" in capsys.readouterr().err


VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
HUGE_TIME = f'{{"timestamp": 1{"0" * 400}, "input_length": 5, "output_length": 3}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t:1: header is ''"),
        (VIDUR, "t: no requests in it"),
        (VIDUR + "-1,5,5\n", "t:2: arrived_at is '-1', expected a number >= 0"),
        (VIDUR + "nan,5,5\n", "t:2: arrived_at is 'nan', expected a number >= 0"),
        (VIDUR + "0,5\n", "t:2: num_decode_tokens is missing"),
        (VIDUR + f"0,{'9' * 200_000},5\n", "t:2: not CSV (field larger than"),
        (
            "arrived_at," + VIDUR + "0,1,5,5\n",
            "t:1: column 'arrived_at' is there",
        ),
        ("Timestamp,Request tokens,Response tokens\n1,0,0\n", "t: no requests in it"),
        (HUGE_TIME, "t:1: timestamp is 1000"),
        ('{"timestamp": 1' + "0" * 9000 + "}", "t:1: not JSON that can be read"),
        ('{"a": ' + "[" * 100_000, "t:1: not JSON that can be read"),
    ],
)
def test_a_trace_that_is_none_is_told_in_one_line(
    text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t"
    trace.write_text(text)
    assert main(["simulate", *FAST, "--workload", str(trace)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "file"), [("simulate", "latency.png"), ("paper", "figure4.png")]
)
def test_a_folder_in_the_place_of_a_result_is_told_before_any_work(
    command: str, file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / file).mkdir()
    assert main([command, *FAST, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--output {tmp_path}: {file} in it is a directory" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_disk_that_is_full_by_the_end_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(output, "write_atomically", full)
    words = ["--policy", "disagg", "--output", str(tmp_path)]
    assert main(["simulate", *FAST, *words]) == 2
    error = capsys.readouterr().err
    assert "summary.json: No space left on device" in error
    assert error.count("\n") == 1


def columns(printed: str) -> list[dict[str, str]]:
    """The rows of a printed table by their headings."""
    head, _, *rows = printed.splitlines()
    names = re.split("  +", head)
    cells = [re.split("  +", row) for row in rows if len(re.split("  +", row)) > 1]
    return [dict(zip(names, row, strict=True)) for row in cells]


def test_a_sweep_prints_p99_and_the_greatest_ttft_beside_p95(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rate", "8", "--policy", "disagg", "--seeds", "1..2"]
    summary = simulate(tmp_path, *words)
    (row,) = columns(capsys.readouterr().out)
    ttft = [run["ttft_ms"] for run in summary["runs"]]
    for heading, key in (("p95 s", "p95"), ("p99 s", "p99"), ("max s", "max")):
        assert row[heading] == f"{np.mean([t[key] for t in ttft]) / 1e3:.2f}"


def test_an_ablation_is_run_where_the_parts_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--ablate", "--requests", "250", "--seeds", "5", "--output", str(out)]
    assert main(["simulate", "--no-progress", "--jobs", "1", *words]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert len(columns(capsys.readouterr().out)) == len(PARTS) + 1
    attained = {run["policy"]: run["slo_attainment"] for run in summary["runs"]}
    rates = {run["rate"] for run in summary["runs"]}
    assert len(rates) == 1 and rates.pop() > 12
    assert attained.pop("kairos") >= 0.99
    assert set(attained) == {f"kairos:{part}={v}" for part, v in PARTS.items()}
    below = [part for part, share in attained.items() if share < 0.985]
    assert len(below) >= 4, attained


def test_capacity_finds_the_highest_rate_within_both_slos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--capacity", "--seeds", "1..3"]
    words += ["--policy", "disagg", "disagg:balance=least"]
    out = tmp_path / "out"
    command = ["simulate", "--no-progress", "--jobs", "1", "--requests", "150"]
    assert main([*command, *words, "--output", str(out)]) == 0
    capacity = json.loads((out / "summary.json").read_text())["capacity"]
    plain, least = capacity["disagg"], capacity["disagg:balance=least"]
    rows = columns(capsys.readouterr().out)
    for found, row in zip((plain, least), rows, strict=True):
        ttft = [found["ttft_ms"][q] for q in ("p95", "p99", "max")]
        assert ttft == sorted(ttft) and ttft[0] <= 4000
        there = [row[q] for q in ("TTFT p95 s there", "p99 s", "max s")]
        assert there == [f"{ms / 1e3:.2f}" for ms in ttft]
        assert found["ci95"][0] <= found["rps99"] <= found["ci95"][1]
        tried = {float(k): v for k, v in found["tried"].items()}
        assert tried[found["rps99"]] >= 0.99
        above = [v for rate, v in tried.items() if rate > found["rps99"]]
        assert above and min(above) < 0.99
    assert least["rps99"] > plain["rps99"] > 1


def test_plan_tries_every_split_and_names_the_best(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["simulate", "--no-progress", "--jobs", "1", "--requests", "80", "--plan"]
    words = ["--prefill", "2", "--decode", "2", "--policy", "disagg"]
    assert main([*command, *words, "--output", str(out)]) == 0
    plan = json.loads((out / "summary.json").read_text())["plan"]["disagg"]
    assert [(s["prefill"], s["decode"]) for s in plan["splits"]] == [
        (1, 3),
        (2, 2),
        (3, 1),
    ]
    assert plan["best"]["rps99"] == max(s["rps99"] for s in plan["splits"])
    # Prefill is the bottleneck of Bursty.
    assert plan["best"]["prefill"] == 3


def test_paper_writes_its_report_summary_and_figures(tmp_path: Path) -> None:
    out = tmp_path / "paper"
    words = ["--seeds", "1", "--requests", "40", "--jobs", "1", "--no-progress"]
    assert main(["paper", "--output", str(out), *words]) == 0
    report = (out / "REPORT.md").read_text()
    for title in ("Table 1", "Table 3", "Table 4", "Figures 4, 5 and 6", "Model error"):
        assert f"## {title}" in report
    assert "cannot match" in report
    for figure in (2, 4, 5, 6):
        assert (out / f"figure{figure}.png").stat().st_size > 5000
    summary = json.loads((out / "summary.json").read_text())
    assert {m["policy"] for m in summary["table_4"]} >= {"oracle", "sl:length=512"}


def test_of_a_paper_only_what_cannot_be_written_is_put_down_to_its_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "figure2.png")

    def no_worker(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    command = ["paper", *FAST, "--seeds", "1", "--output", str(tmp_path / "paper")]
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", full)
        assert main(command) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'paper'}: figure2.png: No space left on device" in error
    monkeypatch.setattr(paper_lab, "run_cells", no_worker)
    with pytest.raises(OSError, match="Too many open files"):
        main(command)


def test_a_count_of_a_rare_event_is_told_with_its_spread() -> None:
    told = spread([6, 7, 8, 20], 7)
    assert (told["min"], told["max"], told["within_15_percent"]) == (6, 20, 0.75)
    low, high = told["ci95"]
    assert 6 <= low < 10.25 < high <= 20
    assert spread([3, 3, 3], 3)["ci95"] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ("0", "an hour passes without an arrival or a token"),
        ("0.05", "requests are stuck for want of KV blocks"),
    ],
)
def test_nodes_that_wait_for_one_anothers_kv_are_told_in_one_line(
    noise: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nodes that prefill for one another: with noise all stand still, without one
    # of them goes on for ever with a prompt that never fits.
    words = ["--requests", "200", "--rate", "10", "--seeds", "7", "--policy", "taichi"]
    words += ["--kv-tokens", "70000", "--model-noise", noise]
    assert main(["simulate", "--no-progress", "--jobs", "1", *words]) == 2
    told = capsys.readouterr().err
    assert "policy taichi: " in told and said in told
    assert told.count("\n") == 1
