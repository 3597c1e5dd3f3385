# SPDX-License-Identifier: Apache-2.0
"""Worker processes that never outlive the command that started them."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.5
_following: int | None = None


def run_parallel(
    call: Callable[[T], R], arguments: Sequence[T], jobs: int
) -> Iterator[R]:
    """Results of a function in worker processes, in the order of `arguments`.

    Args:
        call: A function of a module, of one argument.
        arguments: One a call.
        jobs: Worker processes.
    """
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.backend import resource_tracker as lokys_tracker

    parallel = Parallel(n_jobs=jobs, return_as="generator")
    parent = os.getpid()
    done = False
    try:
        # Ctrl-C on a terminal reaches the workers too, which inherit this: they
        # are ended from here, without a traceback each. Started only now, a
        # tracker would lift it again.
        for tracker in (lokys_tracker, resource_tracker):
            tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            results = parallel(delayed(_follow)(parent, call, a) for a in arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield from results
        done = True
    except Exception as error:
        # joblib, interrupted half-way through setting itself up, stumbles over
        # what it has not set yet: what counts is that it was interrupted.
        stopped = error.__context__
        if isinstance(stopped, (KeyboardInterrupt, SystemExit)):
            raise stopped from None
        raise
    finally:
        if not done:
            # joblib keeps idle workers for the next call; there is none. It would
            # warn of tasks that were not finished: nobody wants them.
            warnings.filterwarnings("ignore", category=UserWarning, module="joblib")
            get_reusable_executor(reuse=True).shutdown(kill_workers=True)


def _follow(parent: int, call: Callable[[Any], R], argument: Any) -> R:
    """In a worker: the call, from a process that ends with its parent."""
    global _following
    if _following != parent:
        _following = parent
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    return call(argument)


def _watch(parent: int) -> None:
    """A parent killed outright cannot end its workers: they look for it."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
