# SPDX-License-Identifier: Apache-2.0
"""How vLLM finds Kairos: two entry points.

``vllm.scheduler_plugins`` (patch 0001) asks `scheduler_class` for the class
behind ``--scheduler-cls kairos``. ``vllm.general_plugins`` calls `register` in
every process before a configuration is made; there bad settings and an
unpatched vLLM are told in one line, before anything starts.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from vllm_kairos.files import UserError

SCHEDULER_NAME = "kairos"


def scheduler_class(async_scheduling: bool) -> type:
    """The scheduler class, plain or async.

    Args:
        async_scheduling: Whether vLLM overlaps scheduling with execution. A
            class that is not an ``AsyncScheduler`` would silently lose that.
    """
    from vllm_kairos.engine.scheduler import AsyncKairosScheduler, KairosScheduler

    return AsyncKairosScheduler if async_scheduling else KairosScheduler


def register() -> None:
    """Check Kairos settings when an engine's configuration is made."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "checks_kairos", False):
        return

    @functools.wraps(create)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scheduler_cls == SCHEDULER_NAME:
            try:
                _check(self.additional_config)
            except UserError as error:
                print(f"vllm-kairos: error: {error}", file=sys.stderr)
                raise SystemExit(2) from None
        return create(self, *args, **kwargs)

    checked.checks_kairos = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = checked


def _check(additional_config: object) -> None:
    """Raise `UserError` for what would fail only once the engine starts."""
    import vllm.plugins
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_kairos.engine.settings import load_settings

    if not (
        hasattr(Scheduler, "_get_new_tokens_limiter")
        and hasattr(vllm.plugins, "SCHEDULER_PLUGINS_GROUP")
    ):
        raise UserError(
            "--scheduler-cls kairos needs the Kairos patch set in this vLLM; "
            "run `vllm-kairos patch apply`"
        )
    settings, _ = load_settings(additional_config)
    if settings.step_log:
        try:
            Path(settings.step_log).parent.mkdir(parents=True, exist_ok=True)
            with open(settings.step_log, "a"):
                pass
        except OSError as error:
            raise UserError(
                f"--additional-config kairos: step_log {settings.step_log!r}: "
                f"{error.strerror}, expected a file that can be written"
            ) from error
