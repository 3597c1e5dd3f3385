# SPDX-License-Identifier: Apache-2.0
"""Every benchmark runs and reports; its budgets are for an idle machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted((CHECKOUT / "ci" / "bench").glob("[!_]*.py"))

#: Where a smaller run is asked for by flags of a script's own.
QUICK = {
    "profile_accuracy.py": ["--json", "--budget", "20s", "--engines", "1"],
    "predict.py": ["--json", "--repeats", "2"],
    "recorder.py": ["--json", "--repeats", "2"],
    "proxy_throughput.py": ["--rounds", "1", "--seconds", "0.5"],
    "scheduler_overhead.py": ["--json", "--turns", "8"],
}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_runs_and_ends_with_one_json_object(script: Path) -> None:
    words = QUICK.get(script.name)
    if words is None:
        told = subprocess.run(
            [sys.executable, script, "--help"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
        assert told.returncode == 0, told.stderr[-2000:]
        words = [
            flag for flag in ("--json", "--smoke", "--quick") if flag in told.stdout
        ]
    done = subprocess.run(
        [sys.executable, script, *words],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    # 1 is a budget missed, which is no matter here.
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert done.stdout.strip(), done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(result, dict) and result


def test_there_are_benchmarks() -> None:
    assert {"predict.py", "proxy_throughput.py"} <= {p.name for p in BENCHMARKS}
