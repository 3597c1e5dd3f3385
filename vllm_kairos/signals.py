# SPDX-License-Identifier: Apache-2.0
"""A command that is terminated cleans up as one that is interrupted does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(SystemExit):
    """SIGTERM has come: raised where the program stands, ends it with 143.

    A `SystemExit`, because asyncio swallows what is neither that nor a
    `KeyboardInterrupt` when a callback raises it.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def _terminate(_: int, __: FrameType | None) -> None:
    # One is enough: a second would cut the cleaning up short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


@contextlib.contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """SIGTERM raises `Terminated` in here, so that every `finally` is run.

    Nothing changes outside the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
