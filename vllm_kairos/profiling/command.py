# SPDX-License-Identifier: Apache-2.0
"""Measure how long an engine's steps take, and write its latency profile.

Proxy and engines predict with a profile: one a model and kind of hardware.

examples:
  vllm-kairos profile --model M --output P.json [-- vllm serve arguments]
      start an engine, drive it, fit, validate on steps it did not fit
  vllm-kairos profile --url http://HOST:PORT --step-log FILE --output P.json
      the same on an engine that runs already with its step log in FILE
  vllm-kairos profile --from-steps FILE... --output P.json
      fit step records only
  vllm-kairos profile --validate P.json --from-steps FILE... --json
      errors of a profile on other steps
  vllm-kairos profile --report P.json [--from-steps FILE...] [--output DIR]
      tables and figures
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vllm_kairos.core.profile import Profile
from vllm_kairos.files import UserError, load_profile, save_profile
from vllm_kairos.profiling.build import build_profile, validate
from vllm_kairos.profiling.errors import PHASES, warning
from vllm_kairos.profiling.fit import fit_steps
from vllm_kairos.profiling.flags import check_flags, parse_budget_s
from vllm_kairos.profiling.report import draw, report_text
from vllm_kairos.profiling.steps import Steps, read_steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm-kairos profile`."""
    group = parser.add_argument_group("what to do")
    group.add_argument(
        "--model",
        metavar="M",
        help="model to serve and measure; with --url or --from-steps, its name in the "
        "profile",
    )
    group.add_argument(
        "--url",
        help="measure the engine that answers here, e.g. http://localhost:8100",
    )
    group.add_argument(
        "--from-steps",
        nargs="+",
        metavar="FILE",
        help="fit, validate or report on step records (CSV)",
    )
    group.add_argument(
        "--validate", metavar="PROFILE", help="test this profile on --from-steps"
    )
    group.add_argument("--report", metavar="PROFILE", help="report on this profile")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output",
        metavar="FILE|DIR",
        help="profile to write, in a folder that is there; with --report, the folder "
        "of the figures (default: beside the profile)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON line last")
    group.add_argument("--name", help="name of the profile (default: from --output)")
    group.add_argument(
        "--hardware", help="what the engine runs on, as text (default: detected)"
    )
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--budget",
        default="30m",
        metavar="TIME",
        help="time to measure for, e.g. 60s, 30m, 1h; at least 20s (default "
        "%(default)s)",
    )
    group.add_argument(
        "--step-log", metavar="FILE", help="step log of the engine at --url"
    )
    group.add_argument(
        "--engine", metavar="ID", help="engine to take where a step log has several"
    )
    group.add_argument(
        "--report-address",
        metavar="ADDRESS",
        help="ZMQ address of the state reports of the engine at --url, e.g. "
        "tcp://localhost:15600",
    )
    group.add_argument(
        "--prefill-url",
        metavar="URL",
        help="prefill engine whose KV transfers to --url are measured",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="CSV of prompt and output lengths that every replay draws from; one "
        "replay in three (of a short run one in two) is not fitted",
    )
    group.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="TYPE",
        help="element type of the KV cache, e.g. float32 (default %(default)s: the "
        "model's)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="GPUs the engine is spread over (default %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of all that is drawn (default %(default)s)",
    )
    parser.add_argument(
        "serve_args", nargs="*", metavar="-- ARG", help="arguments of vllm serve"
    )


def run(args: argparse.Namespace) -> int:
    """Run `vllm-kairos profile`."""
    check_flags(args)
    if args.report:
        return _report(args)
    if args.validate:
        return _validate(args)
    if args.from_steps:
        return _fit(args)
    return _collect(args)


def _report(args: argparse.Namespace) -> int:
    profile = load_profile(args.report)
    steps = _report_steps(args, profile)
    print(report_text(profile, steps))
    source = Path(args.report)
    folder = args.output or source.with_name(f"{source.stem}-report")
    written, missing = draw(profile, steps, folder)
    for path in written:
        print(f"wrote {path}")
    for sentence in missing:
        print(sentence)
    if args.json:
        print(json.dumps({p: getattr(profile, p).error for p in PHASES}))
    return 0


def _report_steps(args: argparse.Namespace, profile: Profile) -> Steps | None:
    """Steps given, or the raw ones that lie beside the profile."""
    if args.from_steps:
        return read_steps(args.from_steps, args.engine)
    beside = raw_steps_path(args.report)
    if not beside.exists():
        return None
    try:
        return read_steps([beside])
    except UserError as error:
        print(f"note: {error}; reported without it", file=sys.stderr)
        return None


def raw_steps_path(profile_path: str) -> Path:
    """Where the steps a profile was measured with are kept beside it."""
    return Path(profile_path).with_suffix(".steps.csv")


def _validate(args: argparse.Namespace) -> int:
    profile = load_profile(args.validate)
    result = validate(profile, read_steps(args.from_steps, args.engine))
    for phase in PHASES:
        print(error_line(phase, result[phase]))
    _print_dropped(result["dropped"])
    beyond = ", ".join(f"{n} {p}" for p, n in result["extrapolated"].items() if n)
    if beyond:
        print(f"outside the ranges profiled: {beyond}")
    if args.json:
        print(json.dumps(result))
    return 0


def _fit(args: argparse.Namespace) -> int:
    steps = read_steps(args.from_steps, args.engine)
    fit = fit_steps(steps, args.seed)
    profile = build_profile(
        fit,
        name=args.name or Path(args.output).stem,
        model=args.model or "unknown",
        hardware=args.hardware or "unknown",
        engine_version="unknown",
        provenance={
            "steps_from": [Path(path).name for path in args.from_steps],
            "steps": len(steps),
        },
    )
    save_profile(args.output, profile)
    print_fit(profile)
    print(f"wrote {args.output}")
    if args.json:
        print(json.dumps({p: getattr(profile, p).error for p in PHASES}))
    return 0


def print_fit(profile: Profile) -> None:
    """Held-out errors, what was dropped, not measured or not to be trusted."""
    for phase in PHASES:
        part = getattr(profile, phase)
        print(f"{error_line(phase, part.error)} (form {part.form})")
    dropped = profile.provenance.get("dropped_steps")
    if isinstance(dropped, dict):
        _print_dropped(dropped)
    notes = profile.provenance.get("notes")
    for note in notes if isinstance(notes, list) else ():
        print(f"note: {note}")
    held_out = profile.provenance.get("held_out_trace")
    for phase in PHASES:
        told = warning(phase, getattr(profile, phase).error, "held-out steps")
        if told is None and isinstance(held_out, dict):
            told = warning(phase, held_out[phase], "the held-out trace")
        if told is not None:
            print(f"warning: {told}", file=sys.stderr)


def error_line(phase: str, error: dict[str, Any]) -> str:
    """One phase's errors for the screen."""
    if not error.get("count"):
        return f"{phase:<8} no steps"
    return (
        f"{phase:<8} {error['count']:>7.0f} steps  MAPE {error['mape_percent']:.2f} %  "
        f"median {error['median_percent']:.2f} %  P95 {error['p95_percent']:.2f} %  "
        f"bias {error['bias_percent']:+.2f} %"
    )


def _print_dropped(dropped: dict[str, int]) -> None:
    words = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    print(f"dropped  {words}")


def _collect(args: argparse.Namespace) -> int:
    # Imported here: fitting and validating need no HTTP client.
    from vllm_kairos.profiling.collect import Target, profile_engine
    from vllm_kairos.profiling.serve import serving
    from vllm_kairos.profiling.trace import read_lengths

    target = Target(
        url=args.url or "",
        step_log=args.step_log or "",
        output=args.output,
        budget_s=parse_budget_s(args.budget),
        name=args.name,
        model=args.model,
        hardware=args.hardware,
        report_address=args.report_address,
        kv_dtype=args.kv_dtype,
        prefill_url=args.prefill_url,
        tensor_parallel=args.tensor_parallel_size,
        seed=args.seed,
        lengths=read_lengths(args.trace) if args.trace else (),
        serve_args=args.serve_args,
    )

    async def measure() -> Profile:
        if args.url:
            return await profile_engine(target)
        output = Path(args.output)
        step_log = output.with_suffix(".engine-steps.csv")
        print("starting the engine", file=sys.stderr)
        async with serving(
            args.model, args.serve_args, step_log, output.with_suffix(".engine.log")
        ) as started:
            target.url = started.url
            target.step_log = started.step_log
            target.report_address = started.report_address
            profile = await profile_engine(target)
        step_log.unlink(missing_ok=True)
        return profile

    profile = asyncio.run(measure())
    print_fit(profile)
    held_out = profile.provenance.get("held_out_trace")
    if isinstance(held_out, dict):
        print("held-out trace, not fitted:")
        for phase in PHASES:
            print(f"  {error_line(phase, held_out[phase])}")
    print(f"wrote {args.output}")
    if args.json:
        print(json.dumps(held_out or {p: getattr(profile, p).error for p in PHASES}))
    return 0
