# SPDX-License-Identifier: Apache-2.0
"""Names, settings, and what is told before an engine starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.engine.virtual import model_dir
from vllm_kairos.engine.scheduler import AsyncKairosScheduler, KairosScheduler
from vllm_kairos.engine.settings import load_settings
from vllm_kairos.files import UserError


@pytest.mark.parametrize(
    ("async_scheduling", "expected"),
    [(False, KairosScheduler), (True, AsyncKairosScheduler)],
)
def test_name_kairos_resolves_by_async_scheduling(
    async_scheduling: bool, expected: type
) -> None:
    config = SchedulerConfig.default_factory(
        scheduler_cls="kairos", async_scheduling=async_scheduling
    )
    assert config.get_scheduler_cls() is expected
    assert issubclass(AsyncKairosScheduler, AsyncScheduler)


def test_dotted_paths_resolve_as_before() -> None:
    config = SchedulerConfig.default_factory(
        scheduler_cls="vllm_kairos.engine.scheduler.KairosScheduler"
    )
    assert config.get_scheduler_cls() is KairosScheduler


def test_unknown_name_lists_the_registered_ones() -> None:
    config = SchedulerConfig.default_factory(scheduler_cls="kayros")
    with pytest.raises(ValueError, match=r"'kayros'.*kairos"):
        config.get_scheduler_cls()


@pytest.mark.parametrize(
    ("kairos", "told"),
    [
        ({"tau": 70}, "tau"),
        ({"tau_ms": "fast"}, "tau_ms"),
        ({"tau_ms": -1.0}, "tau_ms is -1.0"),
        ({"beta": 1.5}, "beta is 1.5"),
        ({"heartbeat_ms": 0.0}, "heartbeat_ms is 0.0"),
        ({"late_share": 0.0}, "late_share is 0.0"),
        ({"late_share": 0.5}, "late_share is 0.5"),
        ({"feedback": "off"}, "feedback"),
        ({"error_warning_percent": 0.0}, "error_warning_percent is 0.0"),
        ({"mode": "eager"}, "eager"),
        ({"mode": "adaptive"}, "needs a profile"),
        ({"profile": "/nowhere.json"}, "/nowhere.json"),
        (["tau_ms"], "object"),
    ],
)
def test_bad_setting_is_told_in_one_line(kairos: Any, told: str) -> None:
    with pytest.raises(UserError, match=r"\A[^\n]*\Z") as error:
        load_settings({"kairos": kairos})
    assert told in str(error.value)


def test_no_settings_are_needed() -> None:
    settings, profile = load_settings({})
    assert settings.heartbeat_ms == 100.0 and profile is None


def serve(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``vllm serve`` on a model without weights; it must end by itself."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model_dir()]
    command += ["--skip-tokenizer-init", "--host", "127.0.0.1", "--port", "0"]
    return subprocess.run(
        [*command, *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_bad_settings_end_vllm_serve_with_one_line_before_it_starts() -> None:
    done = serve(
        "--scheduler-cls",
        "kairos",
        "--additional-config",
        json.dumps({"kairos": {"tau_ms": 0}}),
    )
    assert done.returncode == 2, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert "vllm-kairos: error:" in last and "tau_ms is 0.0" in last


def test_unpatched_vllm_says_what_to_run(tmp_path: Path) -> None:
    # A vLLM whose scheduler lacks the hook, as an unpatched one does.
    (tmp_path / "sitecustomize.py").write_text(
        "import vllm.v1.core.sched.scheduler as s\n"
        "del s.Scheduler._get_new_tokens_limiter\n"
    )
    done = serve("--scheduler-cls", "kairos", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert "vllm-kairos patch apply" in last
