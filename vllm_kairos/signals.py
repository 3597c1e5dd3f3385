# SPDX-License-Identifier: Apache-2.0
"""What SIGINT and SIGTERM do to a command as it starts, runs and ends.

One that is terminated cleans up as one that is interrupted does.
"""

from __future__ import annotations

import contextlib
import os
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


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def end_at_once() -> None:
    """From now on SIGINT and SIGTERM end the process with 130 and 143.

    For a command that has begun nothing yet, or has cleaned up: an exception
    would come up in the midst of an import or of the interpreter's own end,
    which show it as an error of theirs. A signal that is ignored still is.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM raises `Terminated` in here, so that every `finally` is run.

    And SIGINT a `KeyboardInterrupt` again where it would `end_at_once`.
    Nothing changes outside the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, _terminate)
    if before[0] is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
