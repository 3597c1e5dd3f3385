# SPDX-License-Identifier: Apache-2.0
"""Serve one OpenAI-compatible address for prefill and decode engines.

The same app as vLLM's bundled disagg_proxy_demo.py, with Kairos routing.

examples:
  vllm-kairos proxy --model M --prefill HOST:8100 --decode HOST:8200 --port 8000
      prefill on one engine, decode on the other
  vllm-kairos proxy --model M --prefill HOST:8100 --decode HOST:8200 --port 8000 \\
      --scheduling-policy kairos --profile P.json \\
      --engine-state tcp://HOST:15600 tcp://HOST:15601
      prefills are deflected to the decode engine where that is faster and safe

Ctrl-C or SIGTERM stop it: no new connections, and answers under way have
--stop-grace-s to end. Its exit code is then 130 or 143, as that of every command
here; a systemd unit says SuccessExitStatus=143.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import urllib.error
import urllib.request

import uvicorn

from vllm_kairos.files import UserError
from vllm_kairos.given import refuse_unread
from vllm_kairos.proxy.app import make_app
from vllm_kairos.proxy.flags import (
    ProxySettings,
    add_node_arguments,
    last_component,
    settings_from_args,
)
from vllm_kairos.proxy.flags import (
    add_arguments as add_routing_arguments,
)
from vllm_kairos.proxy.forward import api_key_header
from vllm_kairos.proxy.prompt_length import load_tokenizers_alone

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm-kairos proxy`."""
    add_node_arguments(parser)
    add_routing_arguments(parser)
    parser.add_argument(
        "--stop-grace-s",
        type=int,
        default=30,
        metavar="S",
        help="Seconds that answers under way have to end when the proxy is stopped; "
        "those of a hung node are broken off then (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop.

    Raises:
        UserError: A flag is wrong, a node serves another model, or the port
            is taken.
    """
    logging.basicConfig(level=logging.INFO)
    settings = settings_from_args(args)
    if args.stop_grace_s < 0:
        raise UserError(f"--stop-grace-s is {args.stop_grace_s}, expected at least 0")
    _check_read(args, settings)
    # The port before the nodes: who cannot start has no use for their warnings.
    with listen(args.host, args.port) as listener:
        check_models(settings)
        load_tokenizers_alone()
        host, port = listener.getsockname()[:2]
        logger.info("Proxy at http://%s:%d, policy %s", host, port, settings.policy)
        config = uvicorn.Config(
            make_app(settings),
            log_level="warning",
            access_log=False,
            # A stop waits for answers under way, but not for a hung node's.
            timeout_graceful_shutdown=args.stop_grace_s,
        )
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _check_read(args: argparse.Namespace, settings: ProxySettings) -> None:
    """Refuse a flag that nothing reads as the others are."""
    if "alpha" not in settings.make_policy().margins:
        # The other margins bound the schedule of a prompt that falls back to a
        # decode node, under any policy.
        where = f"with --scheduling-policy {args.scheduling_policy}"
        refuse_unread(args, where, ("alpha",))
    if not settings.engine_state:
        refuse_unread(args, "without --engine-state", ("state_max_age_ms",))


def listen(host: str, port: int) -> socket.socket:
    """A bound listening socket.

    Raises:
        UserError: The address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"--port {port} on {host}: {error.strerror or error}, expected a free port"
        ) from error
    return listener


def check_models(settings: ProxySettings) -> None:
    """Refuse a node that serves another model; one that is down may come later.

    Raises:
        UserError: Node and models are named.
    """
    for node in dict.fromkeys([*settings.prefill, *settings.decode]):
        try:
            question = urllib.request.Request(
                f"http://{node}/v1/models", headers=api_key_header()
            )
            with urllib.request.urlopen(
                question, timeout=settings.connect_timeout_s
            ) as reply:
                served = json.loads(reply.read())["data"][0]["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("Node %s does not name its model yet: %s", node, error)
            continue
        if last_component(str(served)) != last_component(settings.model):
            raise UserError(
                f"node {node} serves {served!r}, expected {settings.model!r} (--model)"
            )
