# SPDX-License-Identifier: Apache-2.0
"""The `vllm-kairos` command: finds the sub-command and runs it.

A sub-command is a module with ``add_arguments(parser)`` and
``run(args) -> int``; its docstring is its help. ``args.given`` tells it which
flags were given. It is imported only when it is asked for, so that
`vllm-kairos patch` works where vLLM, scikit-learn or FastAPI are missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence

from vllm_kairos.signals import Terminated, cleaning_up, end_at_once

COMMANDS = {
    "patch": (
        "vllm_kairos.patching",
        "prepare the installed vLLM for Kairos, check it, or restore it",
    ),
    "profile": (
        "vllm_kairos.profiling.command",
        "measure how long an engine's steps take, and write its latency profile",
    ),
    "simulate": (
        "vllm_kairos.sim.command",
        "compare routing policies on a workload, without a GPU or an engine",
    ),
    "paper": (
        "vllm_kairos.sim.paper",
        "simulate the Kairos paper's tables and figures, ours beside its numbers",
    ),
    "proxy": (
        "vllm_kairos.proxy.command",
        "serve one OpenAI-compatible address for prefill and decode engines",
    ),
}

_DESCRIPTION = """\
Kairos for vLLM: in a cluster with prefill engines and decode engines, a decode
engine runs the prefill of a request itself, in chunks between its decode steps,
when that is predicted to be faster and to keep every token of the decodes in
flight within its latency SLO."""

_EPILOG = """\
first steps:
  vllm-kairos simulate                    what it would do, on this machine, now
  vllm-kairos patch apply                 then: vllm serve --scheduler-cls kairos
  vllm-kairos profile --model M --output P.json
  vllm-kairos proxy --model M --prefill HOST:PORT --decode HOST:PORT --profile P.json

`vllm-kairos COMMAND --help` has the rest."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its name and arguments; those of this process, which does nothing
            else then, where there are none.

    Returns:
        The exit code: 2 for bad input, told in one line; 130 and 143 where it
        was interrupted or terminated, and 141 where the reader of its output
        went away, as the shell has them.
    """
    if argv is None:
        # A start is a second of imports, which do not bear an exception.
        end_at_once()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return 128 + signal.SIGPIPE


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name not in COMMANDS:
        parser = _top_parser()
        if not words:
            parser.print_help(sys.stderr)
            return 2
        parser.parse_args(words)
        return 2
    # Imported here, where a signal finds its handler in place.
    from vllm_kairos.files import UserError
    from vllm_kairos.given import given_flags

    module = importlib.import_module(COMMANDS[name][0])
    parser = _Parser(
        prog=f"vllm-kairos {name}",
        description=(module.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(words[1:])
    args.given = given_flags(parser, words[1:])
    try:
        with cleaning_up():
            return int(module.run(args))
    except UserError as error:
        print(f"vllm-kairos {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vllm-kairos {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Terminated:
        print(f"vllm-kairos {name}: terminated", file=sys.stderr)
        return 128 + signal.SIGTERM


def _top_parser() -> _Parser:
    parser = _Parser(
        prog="vllm-kairos",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from importlib.metadata import version

    parser.add_argument(
        "--version", action="version", version=f"vllm-kairos {version('vllm-kairos')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, (_, text) in COMMANDS.items():
        commands.add_parser(command, help=text)
    return parser


def _stdout_is_closed() -> bool:
    """Whether nobody reads stdout any more; if so, what is left to write goes.

    Another pipe may have broken instead, say one to an engine.
    """
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, 0)
    closed = any(events & select.POLLERR for _, events in poll.poll(0))
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stdout)
        os.close(nowhere)
    return closed


if __name__ == "__main__":
    sys.exit(main())
