# SPDX-License-Identifier: Apache-2.0
"""Budget of a routing decision: what the proxy does on every request's path.

    python ci/bench/decision.py [--json]

Each decision is measured several times over and its best is taken, since on a
shared machine the others measure the neighbours; the p99 is over decisions on
different fleets. A decision includes the view of the fleet the proxy makes
for it, with a node's state rebuilt as a report or a dispatch makes it do.
Prints one JSON line last with --json; exits with 1 where a budget is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_kairos.core.fleet import Request  # noqa: E402
from vllm_kairos.core.messages import DeflectedReport, StateReport  # noqa: E402
from vllm_kairos.core.policies import make_policy  # noqa: E402
from vllm_kairos.core.settings import Settings  # noqa: E402
from vllm_kairos.files import load_profile  # noqa: E402
from vllm_kairos.proxy.flags import ProxySettings  # noqa: E402
from vllm_kairos.proxy.fleet import Node, ProxyFleet  # noqa: E402
from vllm_kairos.proxy.ledger import Kind  # noqa: E402

PROFILE = ROOT / "profiles" / "a100-deepseek-v2-lite.json"
PROMPT_TOKENS = 32_768
#: (prefill nodes, decode nodes): p99 budget in microseconds.
BUDGETS_US = {(2, 2): 100.0, (64, 256): 1000.0}
PASSES = 4
QUEUE = 10_000
QUEUE_BUDGET_US = 1000.0


def report(rng: random.Random, prefills: bool, seq: int) -> StateReport:
    """A node somewhere in its day's work."""
    decodes = 0 if prefills else rng.randint(0, 48)
    queue = [(rng.randint(200, 9000), 0) for _ in range(rng.randint(0, 4))]
    deflected = []
    if not prefills and rng.random() < 0.3:
        deflected = [DeflectedReport("x", rng.randint(100, 4000), 0)]
    return StateReport(
        engine_id="e",
        incarnation="one",
        seq=seq,
        time_s=0.0,
        role="kv_both",
        decodes=decodes,
        decode_kv_tokens=decodes * rng.randint(500, 2500),
        deflected=deflected,
        prefills=queue if prefills else [],
        more_prefill_tokens=0,
        awaiting_kv=0,
        awaiting_kv_tokens=0,
        free_kv_blocks=60_000,
        total_kv_blocks=75_000,
        block_size=16,
        budget_tokens=8192,
        max_num_seqs=256,
        admitted=[],
        steps=[],
        step_remaining_ms=rng.uniform(0, 50),
        limit_ms=63.0,
    )


class Bench:
    """A proxy's fleet of so many nodes, and a policy over it."""

    def __init__(self, prefill: int, decode: int, policy: str, **options: object):
        profile = load_profile(PROFILE)
        names = [f"p{i}:1" for i in range(prefill)], [f"d{i}:1" for i in range(decode)]
        nodes = [*names[0], *names[1]]
        settings = ProxySettings(
            profile.model,
            *names,
            profiles=dict.fromkeys(nodes, profile),
            state_max_age_ms=1e9,
        )
        self.rng = random.Random(11)
        self.fleet = ProxyFleet(settings)
        self.policy = make_policy(policy, Settings(), **options)
        self.seq = 0
        self.now_s = 100.0
        self._open: Node | None = None
        for node in self.fleet.nodes():
            self.report(node.address)

    def report(self, address: str) -> None:
        """One node's next report."""
        self.seq += 1
        node = self.fleet[address]
        made = report(self.rng, address.startswith("p"), self.seq)
        node.observe(made, self.now_s)

    def stir(self) -> list[str]:
        """What happens between two decisions: reports, and a dispatch.

        Returns:
            The nodes it happened to.
        """
        nodes = self.fleet.nodes()
        touched = self.rng.sample(nodes, min(len(nodes), 4))
        for node in touched:
            self.report(node.address)
        if self._open is not None:
            self._open.ledger.close("t")
            touched.append(self._open)
        self._open = self.rng.choice(nodes)
        self._open.ledger.open("t", Kind.PREFILL, 3000, self.now_s)
        self.now_s += 0.002
        return [node.address for node in (*touched, self._open)]


def best_us(measure: Callable[[], float], repeats: int) -> float:
    return 1e6 * min(measure() for _ in range(repeats))


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def decisions_us(
    bench: Bench, prompt_tokens: int, decisions: int, repeats: int
) -> tuple[list[float], int]:
    """Microseconds of each decision, and how many of them deflected."""
    policy, fleet = bench.policy, bench.fleet
    request = Request(prompt_tokens, "r")
    deflected = 0
    times = []
    for _ in range(decisions):
        # What was made of them is forgotten before each repeat, so that every
        # repeat does all of the work.
        changed = bench.stir()
        deflected += policy.route(request, fleet.view(bench.now_s)).deflected

        def once(changed: list[str] = changed) -> float:
            for address in changed:
                fleet[address].ledger.version += 1
            started = time.thread_time()
            policy.route(request, fleet.view(bench.now_s))
            return time.thread_time() - started

        times.append(best_us(once, repeats))
    return times, deflected


def queue_us(
    prefill: int, decode: int, decisions: int, repeats: int
) -> dict[str, float]:
    """Microseconds a decision takes over a long queue; of an arrival, a leave.

    A look at the queue sends as many requests as there is room for, and takes
    so long divided by so many. One that sends none counts as one decision.
    """
    rng = random.Random(4)
    bench = Bench(prefill, decode, "kairos", dispatch="late")
    policy, now_ms = bench.policy, bench.now_s * 1e3
    for number in range(QUEUE):
        tokens = min(60_000, 1 + int(rng.lognormvariate(7.6, 1.0)))
        policy.enqueue(Request(tokens, str(number), now_ms - rng.uniform(0, 30_000)))
    looks, whole, arrivals, leaves = [], [], [], []
    number, sent = QUEUE, 0
    for _ in range(decisions):
        touched = bench.stir()
        best = [float("inf")] * 4
        for _ in range(repeats):
            for address in touched:
                bench.fleet[address].ledger.version += 1
            started = time.thread_time()
            routed = policy.assign(bench.fleet.view(bench.now_s))
            took = time.thread_time() - started
            best[0] = min(best[0], took / max(1, len(routed)))
            best[3] = min(best[3], took)
            for request, _ in routed:
                policy.enqueue(request)
            number += 1
            arrived = Request(2000, str(number), now_ms - 10_000)
            started = time.thread_time()
            policy.enqueue(arrived)
            best[1] = min(best[1], time.thread_time() - started)
            started = time.thread_time()
            policy.withdraw(str(number))
            best[2] = min(best[2], time.thread_time() - started)
        sent += len(routed)
        for values, value in zip((looks, arrivals, leaves, whole), best, strict=True):
            values.append(1e6 * value)
    return {
        "decision_p99_us": round(p99(looks), 1),
        "enqueue_p99_us": round(p99(arrivals), 1),
        "withdraw_p99_us": round(p99(leaves), 1),
        "look_p99_us": round(p99(whole), 1),
        "sent_a_look": round(sent / decisions, 2),
    }


def main() -> int:
    """Measure, print, compare with the budgets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    parser.add_argument("--decisions", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--policy", default="kairos")
    args = parser.parse_args()
    gc.disable()
    met = True
    result: dict[str, object] = {"benchmark": "decision", "policy": args.policy}

    budgets = []
    for (prefill, decode), budget in BUDGETS_US.items():
        # The same decisions on the same fleets some seconds apart.
        passes = []
        for _ in range(PASSES):
            bench = Bench(prefill, decode, args.policy)
            measured, deflected = decisions_us(
                bench, PROMPT_TOKENS, args.decisions, args.repeats
            )
            passes.append(measured)
        times = [min(each) for each in zip(*passes, strict=True)]
        us = p99(times)
        met &= us <= budget
        budgets.append(
            {
                "nodes": f"{prefill}P{decode}D",
                "prompt_tokens": PROMPT_TOKENS,
                "p50_us": round(p99(sorted(times)[: len(times) // 2]), 1),
                "p99_us": round(us, 1),
                "budget_us": budget,
                "met": us <= budget,
                "deflected_share": round(deflected / len(times), 2),
            }
        )
        print(budgets[-1])
    result["budgets"] = budgets

    curve = []
    few = max(20, args.decisions // 6)
    for prefill, decode in ((1, 1), (2, 2), (8, 8), (16, 64), (64, 256)):
        bench = Bench(prefill, decode, args.policy)
        for tokens in (512, 2048, 8192, 32_768, 131_072):
            times, _ = decisions_us(bench, tokens, few, args.repeats)
            point = {
                "nodes": f"{prefill}P{decode}D",
                "prompt_tokens": tokens,
                "p50_us": round(sorted(times)[len(times) // 2], 1),
                "p99_us": round(p99(times), 1),
            }
            curve.append(point)
            print(point)
    result["curve"] = curve

    queues = []
    for prefill, decode in BUDGETS_US:
        queued = queue_us(prefill, decode, few, args.repeats)
        within = queued["decision_p99_us"] <= QUEUE_BUDGET_US
        met &= within
        queues.append(
            {
                "nodes": f"{prefill}P{decode}D",
                "waiting": QUEUE,
                **queued,
                "budget_us": QUEUE_BUDGET_US,
                "met": within,
            }
        )
        print(queues[-1])
    result["queues"] = queues
    result["met"] = met
    if args.json:
        print(json.dumps(result))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
