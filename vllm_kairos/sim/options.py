# SPDX-License-Identifier: Apache-2.0
"""Command-line values of the simulator, checked at the edge."""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.policies import policies
from vllm_kairos.core.profile import Profile
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import UserError, load_profile
from vllm_kairos.sim.cells import PolicySpec, WorkloadSpec
from vllm_kairos.sim.cluster import ClusterSettings, ModelError
from vllm_kairos.sim.node import NodeLimits
from vllm_kairos.sim.workload import WORKLOADS

DEFAULT_PROFILE = "a100-deepseek-v2-lite"

#: Values a list of numbers may come to, and the largest of whole ones, up to
#: which a float holds every whole number.
_MOST_NUMBERS = 10_000
_LARGEST_WHOLE = 2**53
#: Nobody simulates more; a slip of the keyboard would run for ever.
_MOST_NODES = 10_000
_MOST_REQUESTS = 10_000_000
_MOST_KV_TOKENS = 100_000_000
_MOST_CV = 100.0

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_profiles() -> dict[str, Path]:
    """Profiles that come with the package, by name."""
    for place in (_PACKAGE / "_profiles", _PACKAGE.parent / "profiles"):
        found = {path.stem: path for path in sorted(place.glob("*.json"))}
        if found:
            return found
    return {}


def profile_of(name: str) -> Profile:
    """A profile by path, or by the name of one that is shipped."""
    shipped = shipped_profiles()
    if not os.path.exists(name):
        if name in shipped:
            return load_profile(shipped[name])
        raise UserError(
            f"profile {name}: no such file, and not one of the shipped profiles "
            f"({', '.join(shipped) or 'there are none'})"
        )
    return load_profile(name)


def _near(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.4) or known
    return ", ".join(close)


def _value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def parse_policy(text: str, settings: Settings) -> PolicySpec:
    """``name`` or ``name:key=value,key=value``.

    Raises:
        UserError: A name is unknown (the nearest ones are listed), or a value
            is one the policy does not take.
    """
    name, _, rest = text.partition(":")
    known = policies()
    if name not in known:
        raise UserError(
            f"unknown policy {name!r}, the nearest are: {_near(name, sorted(known))}"
        )
    own = list(inspect.signature(known[name].__init__).parameters)[2:]
    allowed = [*own, "tau_ms", "ttft_slo_ms", *known[name].margins]
    options: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"policy {text!r}: {part!r} is not of the form key=value")
        if key not in allowed:
            raise UserError(
                f"policy {name!r} has no setting {key!r}, the nearest are: "
                f"{_near(key, allowed)}"
            )
        options[key] = _value(value)
    if "candidates" in options:
        chosen = str(options["candidates"]).split("/")
        try:
            options["candidates"] = tuple(int(c) for c in chosen)
        except ValueError:
            raise UserError(
                f"policy {text!r}: candidates is {options['candidates']!r}, "
                "expected chunk sizes as 2048/1024/512"
            ) from None
    spec = PolicySpec(text, name, options)
    try:
        spec.make(settings)
    except (ValueError, TypeError) as error:
        raise UserError(f"policy {text!r}: {error}") from error
    return spec


def parse_numbers(words: Sequence[str], flag: str, whole: bool) -> list[float]:
    """Numbers and ranges ``A..B`` or ``A..B..STEP``, both ends included.

    Raises:
        UserError: Not numbers, none, too many or one twice, or a range without
            an end.
    """
    out: list[float] = []
    for word in (w for words_ in words for w in words_.split(",") if w):
        parts = word.split("..")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        bad = len(numbers) not in (1, 2, 3) or not all(map(math.isfinite, numbers))
        if whole and not bad:
            bad = any(
                number != int(number) or not 0 <= number <= _LARGEST_WHOLE
                for number in numbers
            )
        if bad:
            kind = "whole numbers >= 0 (and <= 2^53)" if whole else "numbers"
            raise UserError(f"{flag} {word}: expected {kind}, or A..B, or A..B..STEP")
        if len(numbers) == 1:
            out.append(numbers[0])
            continue
        first, last, *rest = numbers
        step = rest[0] if rest else 1.0
        if step <= 0 or last < first:
            raise UserError(f"{flag} {word}: expected A <= B and STEP > 0")
        steps = (last - first) / step
        if steps >= _MOST_NUMBERS:
            raise UserError(f"{flag} {word}: expected at most {_MOST_NUMBERS} numbers")
        count = int(steps + 1e-9) + 1
        out += [round(first + step * i, 9) for i in range(count)]
    if not out:
        raise UserError(f"{flag} {' '.join(words)}: expected numbers, there are none")
    check_once(flag, [f"{number:.15g}" for number in out])
    return out


def check_once(flag: str, values: Sequence[str]) -> None:
    """Refuse a value that is given twice: it would count twice in a mean."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UserError(f"{flag} {value}: given twice, expected once")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the cluster, the workload and the SLOs."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--prefill",
        type=int,
        default=2,
        metavar="N",
        help="prefill nodes (default %(default)s)",
    )
    group.add_argument(
        "--decode",
        type=int,
        default=2,
        metavar="N",
        help="decode nodes (default %(default)s)",
    )
    add_profile_argument(group)
    group.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="GB",
        help="bandwidth of a link in gigabytes a second (default: the profile's)",
    )
    group.add_argument(
        "--link-hops",
        type=int,
        choices=(1, 2),
        default=2,
        help="2: KV leaves over the source's link, then arrives over the target's "
        "(fits the paper's transfer times); 1: written straight into the other GPU "
        "(default %(default)s)",
    )
    group.add_argument(
        "--heartbeat-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="milliseconds between a node's state reports (default %(default)g)",
    )
    group.add_argument(
        "--budget-tokens",
        type=int,
        metavar="TOKENS",
        help="most tokens of a step, vLLM's max_num_batched_tokens (default: the "
        "profile's)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="most requests of a step, as vLLM's (default: the profile's)",
    )
    group.add_argument(
        "--kv-tokens",
        type=int,
        metavar="TOKENS",
        help="KV cache of a node (default: the profile's)",
    )
    group.add_argument(
        "--model-bias",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="true step times are this share longer than predicted: 0.1 is 10 %% "
        "(default %(default)g)",
    )
    group.add_argument(
        "--model-noise",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="standard deviation of true step times around that (default %(default)g)",
    )
    group = parser.add_argument_group("SLOs and margins")
    group.add_argument(
        "--tau-ms",
        type=float,
        default=70.0,
        metavar="MS",
        help="TBT SLO: most milliseconds between two tokens (default %(default)g)",
    )
    group.add_argument(
        "--ttft-slo-ms",
        type=float,
        default=4000.0,
        metavar="MS",
        help="TTFT SLO: most milliseconds to the first token (default %(default)g)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        default=1.3,
        help="a prefill may be deflected where its TTFT is at most this factor of "
        "that on the prefill node (the paper's Eq. 7; default %(default)g)",
    )
    group.add_argument(
        "--beta",
        type=float,
        default=0.9,
        help="share of the TBT SLO that a step with a deflected prefill may take "
        "(the paper's Eq. 5; default %(default)g)",
    )


def add_profile_argument(parser: argparse._ActionsContainer) -> None:
    """``--profile``."""
    parser.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE",
        help=f"step latencies: one of {', '.join(shipped_profiles())}, or a file of "
        "`vllm-kairos profile` (default %(default)s)",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """``--jobs`` and ``--no-progress``."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="worker processes (default: one a core, %(default)s here)",
    )
    parser.add_argument(
        "--no-progress", action="store_true", help="no progress bar on stderr"
    )


def check_requests(requests: int) -> None:
    """Refuse a number of requests that is none, or that no run could end with."""
    if requests < 1:
        raise UserError(f"--requests {requests}: expected a whole number >= 1")
    if requests > _MOST_REQUESTS:
        raise UserError(
            f"--requests {requests}: expected a whole number <= {_MOST_REQUESTS:,}"
        )


def check_jobs(jobs: int) -> None:
    """Refuse a number of workers that is none."""
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: expected a whole number >= 1")


def settings_of(args: argparse.Namespace) -> Settings:
    """SLOs and margins."""
    try:
        return Settings(args.tau_ms, args.ttft_slo_ms, args.alpha, args.beta)
    except ValueError as error:
        raise UserError(str(error)) from error


def limits_of(profile: Profile, held_ms: float = 4000.0) -> NodeLimits:
    """Limits of a node: the profiled engine's, where the profile has them."""
    engine = profile.engine
    if engine is None:
        return NodeLimits(held_ms=held_ms)
    return NodeLimits(
        budget_tokens=engine.budget_tokens,
        max_num_seqs=engine.max_num_seqs,
        kv_tokens=engine.kv_tokens,
        block_size=engine.block_size,
        held_ms=held_ms,
    )


def cluster_of(args: argparse.Namespace, profile: Profile) -> ClusterSettings:
    """The cluster.

    Raises:
        UserError: A value is out of range.
    """

    def least(
        name: str,
        value: float | None,
        bound: float,
        strict: bool,
        most: float = math.inf,
    ) -> None:
        if value is None:
            return
        fine = value > bound if strict else value >= bound
        if not (math.isfinite(value) and fine):
            sign = ">" if strict else ">="
            raise UserError(f"--{name} {value}: expected a number {sign} {bound:g}")
        if value > most:
            raise UserError(f"--{name} {value}: expected a number <= {most:,.10g}")

    least("prefill", args.prefill, 1, False, _MOST_NODES)
    least("decode", args.decode, 1, False, _MOST_NODES)
    least("link-gb-per-s", args.link_gb_per_s, 0, True)
    least("heartbeat-ms", args.heartbeat_ms, 0, True)
    least("budget-tokens", args.budget_tokens, 1, False)
    least("max-num-seqs", args.max_num_seqs, 1, False)
    least("kv-tokens", args.kv_tokens, 1, False, _MOST_KV_TOKENS)
    least("model-bias", args.model_bias, -1, True, 1000)
    least("model-noise", args.model_noise, 0, False, 5)
    link = profile.link_model()
    if args.link_gb_per_s is not None:
        if profile.kv is None:
            raise UserError(
                "--link-gb-per-s: the profile does not say how many bytes a token's "
                "KV takes (kv.bytes_per_token)"
            )
        kv = profile.kv
        link = LinkModel(kv.bytes_per_token, args.link_gb_per_s * 1e9, kv.fixed_ms)
    if link is not None:
        link = replace(link, hops=args.link_hops)
    limits = limits_of(profile, args.ttft_slo_ms)
    asked: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("budget_tokens", "max_num_seqs", "kv_tokens")
        if getattr(args, name) is not None
    }
    limits = replace(limits, **asked)
    if limits.budget_tokens < limits.max_num_seqs:
        raise UserError(
            f"--budget-tokens {limits.budget_tokens}: expected a number >= "
            f"{limits.max_num_seqs}, --max-num-seqs, as vLLM does"
        )
    return ClusterSettings(
        profile.step_model(),
        link,
        limits,
        args.prefill,
        args.decode,
        args.heartbeat_ms,
        ModelError(args.model_bias, args.model_noise),
    )


def workload_of(
    name: str, requests: int | None, cv: float | None, arrivals: str | None = None
) -> WorkloadSpec:
    """A workload by name or path; a trace is read once to find its errors."""
    if requests is not None:
        check_requests(requests)
    if cv is not None and not 0 <= cv <= _MOST_CV:
        sign = f"<= {_MOST_CV:g}" if cv > _MOST_CV else ">= 0"
        raise UserError(f"--cv {cv}: expected a number {sign}")
    if arrivals == "poisson":
        cv = 1.0
    if name not in WORKLOADS and not os.path.exists(name):
        raise UserError(
            f"unknown workload {name!r}: not a file, and not one of "
            f"{', '.join(WORKLOADS)}"
        )
    spec = WorkloadSpec(name, requests, cv)
    if name not in WORKLOADS:
        spec.rows(None, 0)
    return spec
