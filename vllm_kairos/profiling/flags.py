# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm-kairos profile` that do not fit together, told before any work."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from vllm_kairos.files import UserError, check_output_directory, check_output_file
from vllm_kairos.given import refuse_unread

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_BUDGET_S = 20.0
#: Largest seed that NumPy's older generators take.
_LARGEST_SEED = 2**32 - 1
_FITTED = ("output", "json", "name", "model", "hardware", "seed")
_MEASURED = (*_FITTED, "budget", "trace", "kv_dtype", "tensor_parallel_size")
#: What is read by each thing that can be asked for.
READ: dict[str, tuple[str, ...]] = {
    "report": ("report", "from_steps", "engine", "output", "json"),
    "validate": ("validate", "from_steps", "engine", "json"),
    "from_steps": ("from_steps", "engine", *_FITTED),
    "url": ("url", "step_log", "report_address", "prefill_url", *_MEASURED),
    "model": ("serve_args", "prefill_url", *_MEASURED),
}
#: Files that measuring writes beside the profile.
_WRITTEN_SUFFIXES = (
    ".steps.csv",
    ".progress.json",
    ".engine-steps.csv",
    ".engine.log",
)


def parse_budget_s(text: str) -> float:
    """Seconds of ``90``, ``60s``, ``30m`` or ``1h``.

    Raises:
        UserError: It is none of these or under the least useful budget.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds < _LEAST_BUDGET_S:
        raise UserError(
            f"--budget is {text!r}, expected a time of at least "
            f"{_LEAST_BUDGET_S:.0f}s such as 60s, 30m or 1h"
        )
    return seconds


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what cannot be done.

    Raises:
        UserError: A flag is missing, wrong, or not used with the others.
    """
    if args.report and args.validate:
        raise UserError("--report and --validate given, expected one of them")
    if args.url and args.from_steps:
        raise UserError("--url and --from-steps given, expected one of them")
    _check_read(args)
    if args.report:
        if args.output:
            check_output_directory(args.output, "--output")
        return
    if args.validate:
        if not args.from_steps:
            raise UserError("--validate needs --from-steps with steps to test on")
        return
    if not (args.url or args.from_steps or args.model):
        raise UserError(
            "nothing to do, expected --model, --url, --from-steps, --validate or "
            "--report"
        )
    if not args.output:
        raise UserError("--output is missing, expected the profile to write")
    check_output_file(args.output, "--output")
    _check_inputs_kept(args)
    if not 0 <= args.seed <= _LARGEST_SEED:
        raise UserError(f"--seed is {args.seed}, expected 0 to {_LARGEST_SEED}")
    if args.url and not args.step_log:
        raise UserError(
            "--url needs --step-log, the file the engine was told to log steps to "
            '(--additional-config \'{"kairos": {"step_log": "FILE"}}\')'
        )
    if args.prefill_url and not args.url:
        raise UserError("--prefill-url needs --url, the engine that fetches the KV")
    parse_budget_s(args.budget)
    if args.tensor_parallel_size < 1:
        raise UserError(
            f"--tensor-parallel-size is {args.tensor_parallel_size}, expected >= 1"
        )


def _check_read(args: argparse.Namespace) -> None:
    """Refuse a flag that what was asked for does not read."""
    for asked, read in READ.items():
        if getattr(args, asked):
            flag = "--" + asked.replace("_", "-")
            refuse_unread(args, f"with {flag}", read=read)
            break
    if args.report and not args.from_steps:
        refuse_unread(args, "with --report without --from-steps", ("engine",))


def _check_inputs_kept(args: argparse.Namespace) -> None:
    """Refuse to write over what is to be read."""
    output = Path(args.output)
    written = [output]
    if not args.from_steps:
        written += [output.with_suffix(suffix) for suffix in _WRITTEN_SUFFIXES]
    files = [("--from-steps", path) for path in args.from_steps or ()]
    files += [("--step-log", args.step_log), ("--trace", args.trace)]
    for flag, path in files:
        for target in written:
            if path and _same_file(Path(path), target):
                raise UserError(
                    f"{flag} {path}: would be written over (--output {output}), "
                    "expected another file"
                )


def _same_file(a: Path, b: Path) -> bool:
    if a.exists() and b.exists():
        return a.samefile(b)
    return a.resolve() == b.resolve()
