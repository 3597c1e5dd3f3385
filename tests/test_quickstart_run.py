# SPDX-License-Identifier: Apache-2.0
"""The quick start as a user runs it, on real engines."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quickstart.processes import port_is_free
from tests.test_quickstart import EXAMPLES, profile
from vllm_kairos.files import save_profile

POLICIES = ("round_robin", "kairos")


def first_port() -> int:
    """A port with room above it for all that a run needs.

    Below those that outgoing connections are given, which may be anybody's.
    """
    rng = random.Random()
    while True:
        first = rng.randrange(10_000, 29_000)
        needed = (first + up + i for up in (0, 1000, 2000) for i in range(30))
        if all(map(port_is_free, needed)):
            return first


def start(output: Path, *words: str) -> subprocess.Popen[str]:
    """Start it with a profile given, so that it does not measure one first."""
    save_profile(output.parent / "profile.json", profile(prefill_ms=0.5))
    # The ports it takes lie up to 2,100 above this one.
    port = first_port()
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "quickstart", "--output", str(output)),
            *("--profile", str(output.parent / "profile.json"), "--port", str(port)),
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        # A shell's background job is born deaf to Ctrl-C, and so are its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def processes_of(output: Path) -> list[int]:
    """Processes that were started with this output folder's logs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            opened = [os.readlink(link) for link in (entry / "fd").iterdir()]
        except OSError:
            continue
        if any(path.startswith(str(output)) for path in opened):
            found.append(int(entry.name))
    return found


@pytest.mark.cluster
def test_the_quick_start_ends_with_a_table_whose_rows_are_there(
    layer_state: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    process = start(output, "--requests", "12", "--repetitions", "2", "--rate", "4")
    try:
        text, progress = process.communicate(timeout=500)
    finally:
        process.terminate()
    assert process.returncode == 0, progress[-3000:]
    assert "tau" in text and "TTFT SLO" in text and "output tokens/s" in text
    assert all(policy in text for policy in POLICIES)
    for phase in ("Starting engines", "Starting proxies", "Warming up", "kairos 2/2"):
        assert phase in progress
    summary = json.loads((output / "summary.json").read_text())
    with (output / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for policy in POLICIES:
        arm = summary["arms"][policy]
        mine = [row for row in rows if row["policy"] == policy]
        assert arm["requests"] == len(mine) == 12
        assert arm["failures"] == 0
        deflected = sum(row["route"] == "deflected" for row in mine)
        assert arm["deflections"] == deflected
        assert set(arm["ttft_ms"]) == set(arm["tbt_ms"]) == {"p50", "p95", "p99", "max"}
        assert arm["output_tokens_per_s"] > 0
        assert 0 <= arm["slo_attainment"] <= 1 and 0 <= arm["tbt_over_slo_share"] <= 1
    assert summary["arms"]["round_robin"]["deflections"] == 0

    def sent(policy: str) -> list[tuple[str, str, str]]:
        keys = ("due_s", "prompt_tokens", "wanted_tokens")
        return [
            (row[keys[0]], row[keys[1]], row[keys[2]])
            for row in rows
            if row["policy"] == policy
        ]

    assert sent("kairos") == sent("round_robin"), "the arms are not the same"
    assert (output / "cdf.png").stat().st_size > 1000
    assert processes_of(output) == []


@pytest.mark.cluster
def test_ctrl_c_stops_everything_that_was_started(
    layer_state: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    process = start(output)
    deadline = time.monotonic() + 120
    while len(processes_of(output)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(processes_of(output)) >= 2, "no engine was started"
    process.send_signal(signal.SIGINT)
    _, progress = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in progress
    assert processes_of(output) == []
