# SPDX-License-Identifier: Apache-2.0
"""Start, measure, compare: `examples/quickstart.sh` in Python."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from quickstart.compare import Comparison, Options
from vllm_kairos.core.policies import policies
from vllm_kairos.files import UserError

ROUND_ROBIN = "round_robin"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"quickstart: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    out = _Parser(
        prog="quickstart.sh",
        description="Real vLLM engines on this machine's CPU, vLLM's bundled "
        "proxy, and the same bursty arrivals under each policy.",
    )
    add = out.add_argument
    add("--prefill", type=int, default=1, metavar="N", help="prefill engines (1)")
    add("--decode", type=int, default=1, metavar="N", help="decode engines (1)")
    add("--model", type=Path, metavar="PATH", help="folder of a model (a tiny Llama)")
    add(
        "--policy",
        default=f"{ROUND_ROBIN},kairos",
        metavar="A,B",
        help=f"what to compare: {ROUND_ROBIN}, {', '.join(sorted(policies()))} "
        "(default %(default)s)",
    )
    add("--rate", type=float, metavar="R", help="requests/s (as the machine can bear)")
    add(
        "--requests",
        type=int,
        default=180,
        metavar="N",
        help="requests for each policy, all repetitions together (%(default)s)",
    )
    add(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="runs of each policy, in turns (%(default)s)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths: Azure, Mooncake, or "
        "arrived_at,num_prefill_tokens,num_decode_tokens; lengths are scaled to the "
        "machine, prefixes are not shared",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile of this model here (measured first, in about a minute)",
    )
    add(
        "--output",
        type=Path,
        default=Path("quickstart-results"),
        metavar="DIR",
        help="summary.json, requests.csv, cdf.png, logs (%(default)s)",
    )
    add(
        "--port",
        type=int,
        default=8100,
        metavar="P",
        help="first of the ports used (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of arrivals and prompts (%(default)s)")
    return out


def options(args: argparse.Namespace) -> Options:
    """The flags, checked.

    Raises:
        UserError: A value is out of range; the message names the flag.
    """
    for name in ("prefill", "decode", "requests", "repetitions"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, expected at least 1")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        raise UserError(f"--rate is {args.rate}, expected a number > 0")
    names = args.policy.split(",")
    known = {ROUND_ROBIN, *policies()}
    for name in names:
        if name not in known:
            raise UserError(
                f"--policy has {name!r}, expected names of {sorted(known)} "
                "with commas between them"
            )
    if len(set(names)) < len(names):
        raise UserError(f"--policy is {args.policy!r}, a name is there twice")
    if args.repetitions > args.requests:
        raise UserError(
            f"--repetitions is {args.repetitions}, expected at most --requests, "
            f"which is {args.requests}"
        )
    if not 1024 <= args.port <= 60000:
        raise UserError(f"--port is {args.port}, expected 1024 to 60000")
    if args.model is not None and not (args.model / "config.json").is_file():
        raise UserError(
            f"--model {args.model}: no config.json, expected a model folder"
        )
    return Options(
        prefill=args.prefill,
        decode=args.decode,
        model=args.model,
        policies=tuple(names),
        rate_rps=args.rate,
        requests=args.requests,
        repetitions=args.repetitions,
        trace=args.trace,
        profile=args.profile,
        output=args.output,
        port=args.port,
        seed=args.seed,
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the comparison.

    Returns:
        0, or 1 if a request failed; 2 for bad input; 130 when interrupted.
    """
    args = parser().parse_args()
    # A terminal that closes or a CI that gives up: stop everything, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return Comparison(options(args)).run()
    except UserError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "quickstart: interrupted, everything started was stopped", file=sys.stderr
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
