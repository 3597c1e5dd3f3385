# SPDX-License-Identifier: Apache-2.0
"""The `vllm-kairos` command: the roof over every other package.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> int``.
It is imported only when it is asked for, so that `vllm-kairos patch` works
where vLLM, scikit-learn or FastAPI are missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_kairos.files import UserError

COMMANDS = {
    "patch": ("vllm_kairos.patching", "apply, check or revert the vLLM patch set"),
    "profile": ("vllm_kairos.profiling.command", "measure and fit step latencies"),
    "simulate": ("vllm_kairos.sim.command", "compare policies in virtual time"),
    "paper": ("vllm_kairos.sim.paper", "regenerate the paper's tables and figures"),
    "proxy": ("vllm_kairos.proxy.command", "the disaggregated proxy"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 2 for bad input, which is told in one line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name not in COMMANDS:
        parser = _Parser(prog="vllm-kairos", description=__doc__.split("\n")[0])
        commands = parser.add_subparsers(dest="command", metavar="COMMAND")
        for command, (_, text) in COMMANDS.items():
            commands.add_parser(command, help=text)
        parser.parse_args(words or ["--help"])
        return 2
    module = importlib.import_module(COMMANDS[name][0])
    parser = _Parser(
        prog=f"vllm-kairos {name}",
        description=(module.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(words[1:])
    try:
        return int(module.run(args))
    except UserError as error:
        print(f"vllm-kairos {name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
