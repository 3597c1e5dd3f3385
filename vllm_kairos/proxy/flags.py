# SPDX-License-Identifier: Apache-2.0
"""Flags of the proxy, and the checked settings they make.

`add_arguments` holds the flags that the patched bundled script gains;
`add_node_arguments` those it has already and `vllm-kairos proxy` shares.
"""

from __future__ import annotations

import argparse
import inspect
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from vllm_kairos.core.policies import Policy, make_policy, policies
from vllm_kairos.core.profile import Profile
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import UserError, load_profile

#: The bundled script's name for plain P/D disaggregation.
ROUND_ROBIN = "round_robin"
#: Parts of ``kairos`` that the engines do, and their setting for each.
_ENGINE_PARTS = {"chunks": "mode", "feedback": "feedback"}
_MAPPED = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[^=/\\\[\]:]+):(\d+)=(.+)$")
_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """The bundled script's own flags, and the address to bind."""
    parser.add_argument("--model", "-m", required=True, help="Model name")
    parser.add_argument(
        "--prefill", "-p", nargs="+", default=[], help="Prefill nodes (host:port)"
    )
    parser.add_argument(
        "--decode", "-d", nargs="+", default=[], help="Decode nodes (host:port)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to bind")
    parser.add_argument("--port", type=int, default=8000, help="Server port number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the routing decision; the parser has those of the nodes."""
    group = parser.add_argument_group("routing (vllm-kairos)")
    known = {o for action in parser._actions for o in action.option_strings}
    if "--scheduling-policy" not in known:
        add_policy_argument(group)
    d = Settings()
    group.add_argument(
        "--kv-handshake",
        choices=("nixl", "none"),
        help="How KV is handed over: 'nixl' sends kv_transfer_params as NIXL "
        "and its kin need them; 'none' sends the request twice, for connectors "
        "that find KV by the prompt. Default: nixl wherever vllm-kairos routes",
    )
    group.add_argument(
        "--engine-state",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="ZMQ address of each engine's state reports: one per node in the "
        "order of --prefill then --decode, or host:port=tcp://...",
    )
    group.add_argument(
        "--profile",
        nargs="+",
        default=[],
        metavar="PATH",
        help="Step-latency profile of all nodes, or host:port=PATH of some",
    )
    group.add_argument(
        "--tau-ms",
        type=float,
        default=d.tau_ms,
        metavar="MS",
        help="TBT SLO: most milliseconds between two tokens (%(default)s)",
    )
    group.add_argument(
        "--ttft-slo-ms",
        type=float,
        default=d.ttft_slo_ms,
        metavar="MS",
        help="TTFT SLO: most milliseconds to the first token (%(default)s)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        default=d.alpha,
        help="A prefill may be deflected where its TTFT is at most this factor of "
        "that on the prefill node (%(default)s)",
    )
    group.add_argument(
        "--beta",
        type=float,
        default=d.beta,
        help="Share of the TBT SLO that a step with a deflected prefill may take "
        "(%(default)s)",
    )
    group.add_argument(
        "--chunk-candidates",
        type=int,
        nargs="+",
        default=list(d.candidates),
        metavar="TOKENS",
        help="Chunk sizes of the paper's schedule (%(default)s)",
    )
    group.add_argument(
        "--policy-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="A setting of the policy's own; may be repeated",
    )
    group.add_argument(
        "--dispatch",
        choices=("late", "eager"),
        default=None,
        help="'late': a request waits in the proxy until a prefill node is about "
        "to run dry or a decode node has headroom; 'eager': it is bound to its "
        "nodes when it arrives. Default: what the policy does, late for kairos",
    )
    group.add_argument(
        "--tokenizer",
        default=None,
        help="Tokenizer that counts prompt tokens, default: that of --model; "
        "'none' for an estimate from the length of the text",
    )
    group.add_argument(
        "--state-max-age-ms",
        type=float,
        default=1000.0,
        help="A report older than this is not acted on (%(default)s)",
    )
    group.add_argument(
        "--prefill-timeout-s",
        type=float,
        default=600.0,
        help="Longest a prefill node may take (%(default)s)",
    )
    group.add_argument(
        "--node-timeout-s",
        type=float,
        default=10.0,
        help="A node that has sent no byte of an answer for so long is dead if it "
        "sends no state report either, or does not answer /health (%(default)s)",
    )
    group.add_argument(
        "--answer-timeout-s",
        type=float,
        default=3600.0,
        help="Longest wait for a byte of a node without --engine-state (%(default)s)",
    )
    group.add_argument(
        "--connect-timeout-s",
        type=float,
        default=5.0,
        help="Longest a connection to a node may take (%(default)s)",
    )


def add_policy_argument(parser: argparse._ActionsContainer) -> None:
    """The flag that chooses the policy."""
    parser.add_argument(
        "--scheduling-policy",
        default=ROUND_ROBIN,
        help=f"{ROUND_ROBIN} (default) or one of: {', '.join(sorted(policies()))}",
    )


@dataclass(frozen=True)
class ProxySettings:
    """The proxy's settings, checked.

    Attributes:
        model: Served model name.
        prefill: Prefill nodes, ``host:port``. The list the flags were read
            into, so that nodes the bundled script adds later are seen.
        decode: Decode nodes.
        policy: Name of the routing policy.
        policy_options: Its own settings.
        slo: SLOs and margins.
        handshake: Send NIXL's ``kv_transfer_params``.
        engine_state: ZMQ address of a node's state reports, by node.
        profiles: Profile by node.
        tokenizer: Name or path of the tokenizer, `None` for none.
        state_max_age_ms: Age from which a report is stale.
        prefill_timeout_s: Longest prefill leg.
        connect_timeout_s: Longest wait for a connection.
        node_timeout_s: Silence after which a node is dead.
        answer_timeout_s: Longest wait for a byte of a node without reports.
    """

    model: str
    prefill: list[str]
    decode: list[str]
    policy: str = "disagg"
    policy_options: Mapping[str, object] = field(default_factory=dict)
    slo: Settings = field(default_factory=Settings)
    handshake: bool = True
    engine_state: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    tokenizer: str | None = None
    state_max_age_ms: float = 1000.0
    prefill_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    node_timeout_s: float = 10.0
    answer_timeout_s: float = 3600.0

    def make_policy(self) -> Policy:
        """The routing policy.

        Raises:
            ValueError: Its name or one of its settings is unknown.
        """
        return make_policy(self.policy, self.slo, **self.policy_options)

    @property
    def counts_sent(self) -> bool:
        """Whether the policy is shown what was dispatched since the last report."""
        return self.make_policy().sees != "reports"

    @property
    def counts_prompts(self) -> bool:
        """Whether anything asks how long a prompt is.

        A policy that looks at requests does, and so does the safe schedule of
        a prompt that falls back to a decode node whose profile is known.
        """
        return bool(self.profiles) or not self.make_policy().blind


def settings_from_args(args: argparse.Namespace) -> ProxySettings:
    """Settings out of parsed flags.

    Raises:
        UserError: A flag is wrong; the message names it, the value and what
            was expected.
    """
    for flag, nodes in (("--prefill", args.prefill), ("--decode", args.decode)):
        if not nodes:
            raise UserError(f"{flag} is missing, expected at least one host:port")
        for node in nodes:
            check_node(flag, node)
        if len(set(nodes)) != len(nodes):
            raise UserError(f"{flag} names a node twice: {' '.join(nodes)}")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port is {args.port}, expected 0 to 65535")
    for name in (
        *("state_max_age_ms", "prefill_timeout_s", "connect_timeout_s"),
        *("node_timeout_s", "answer_timeout_s"),
    ):
        value = getattr(args, name)
        if not 0 < value < float("inf"):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is {value}, expected a number > 0")
    nodes = list(dict.fromkeys([*args.prefill, *args.decode]))
    name = args.scheduling_policy
    names = sorted({ROUND_ROBIN, *policies()})
    if name not in names:
        raise UserError(
            f"--scheduling-policy is {name!r}, expected one of {', '.join(names)}"
        )
    options = _policy_options(args.policy_option)
    if args.dispatch is not None:
        if options.setdefault("dispatch", args.dispatch) != args.dispatch:
            raise UserError(
                f"--dispatch is {args.dispatch}, expected the same as "
                f"--policy-option dispatch={options['dispatch']}"
            )
        if args.dispatch == "eager" and not _binds(name):
            # Every other policy is eager as it is.
            del options["dispatch"]
    settings = ProxySettings(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        policy="disagg" if name == ROUND_ROBIN else name,
        policy_options=options,
        slo=_slo(args),
        handshake=args.kv_handshake != "none",
        engine_state=_addresses(args.engine_state, nodes),
        profiles=_profiles(args.profile, nodes, args.model),
        tokenizer=_tokenizer(args),
        state_max_age_ms=args.state_max_age_ms,
        prefill_timeout_s=args.prefill_timeout_s,
        connect_timeout_s=args.connect_timeout_s,
        node_timeout_s=args.node_timeout_s,
        answer_timeout_s=args.answer_timeout_s,
    )
    try:
        settings.make_policy()
    except (ValueError, TypeError) as error:
        raise UserError(f"--scheduling-policy {name}: {error}") from error
    for part, setting in _ENGINE_PARTS.items():
        if part in options:
            raise UserError(
                f"--policy-option {part}: engines do that, expected {setting!r} in "
                "their --additional-config '{\"kairos\": {...}}'"
            )
    return settings


def _binds(policy: str) -> bool:
    """Whether a policy can bind late."""
    known = policies().get(policy)
    return known is not None and "dispatch" in inspect.signature(known).parameters


def check_node(flag: str, node: str) -> None:
    """Raise `UserError` unless `node` is ``host:port``."""
    host, _, port = node.rpartition(":")
    good = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            good = False
    elif not _HOST.match(host):
        good = False
    if not good:
        raise UserError(f"{flag} is {node!r}, expected host:port")


def _tokenizer(args: argparse.Namespace) -> str | None:
    name: str | None = args.tokenizer
    if name is None:
        return str(args.model)
    return None if name.lower() == "none" else name


def _slo(args: argparse.Namespace) -> Settings:
    try:
        return Settings(
            tau_ms=args.tau_ms,
            ttft_slo_ms=args.ttft_slo_ms,
            alpha=args.alpha,
            beta=args.beta,
            candidates=tuple(args.chunk_candidates),
        )
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        name = "chunk_candidates" if name == "candidates" else name
        raise UserError(f"--{name.replace('_', '-')} {rest}") from error


def _policy_options(words: Sequence[str]) -> dict[str, object]:
    options: dict[str, object] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key.isidentifier():
            raise UserError(f"--policy-option is {word!r}, expected KEY=VALUE")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


def _mapped(flag: str, words: Sequence[str], nodes: Sequence[str]) -> dict[str, str]:
    """``host:port=VALUE`` words by node."""
    out: dict[str, str] = {}
    for word in words:
        match = _MAPPED.match(word)
        if match is None:
            raise UserError(
                f"{flag} is {word!r}, expected host:port=VALUE like the others"
            )
        node = f"{match[1]}:{match[2]}"
        if node not in nodes:
            raise UserError(
                f"{flag} names {node!r}, which is neither in --prefill nor --decode"
            )
        out[node] = match[3]
    return out


def _addresses(words: Sequence[str], nodes: Sequence[str]) -> dict[str, str]:
    if any(_MAPPED.match(word) for word in words):
        out = _mapped("--engine-state", words, nodes)
    elif words and len(words) != len(nodes):
        raise UserError(
            f"--engine-state has {len(words)} addresses, expected one for each of "
            f"the {len(nodes)} nodes or host:port=ADDRESS"
        )
    else:
        out = dict(zip(nodes, words, strict=True)) if words else {}
    for address in out.values():
        try:
            parts = urlsplit(address)
            good = parts.scheme == "ipc" or (
                parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port)
            )
        except ValueError:
            good = False
        if not good:
            raise UserError(
                f"--engine-state is {address!r}, expected tcp://host:port or ipc://PATH"
            )
    return out


def last_component(model: str) -> str:
    """What vLLM's script compares of two model names."""
    return model.rstrip("/").split("/")[-1]


def _profiles(
    words: Sequence[str], nodes: Sequence[str], model: str
) -> dict[str, Profile]:
    if len(words) == 1 and (Path(words[0]).exists() or not _MAPPED.match(words[0])):
        paths = dict.fromkeys(nodes, words[0])
    else:
        paths = _mapped("--profile", words, nodes)
    loaded: dict[str, Profile] = {}
    for path in dict.fromkeys(paths.values()):
        profile = load_profile(path)
        if last_component(profile.model) != last_component(model):
            raise UserError(
                f"--profile {path} is of model {profile.model!r}, expected one of "
                f"{last_component(model)!r} (--model)"
            )
        loaded[path] = profile
    return {node: loaded[path] for node, path in paths.items()}
