# SPDX-License-Identifier: Apache-2.0
"""What vLLM's bundled ``disagg_proxy_demo.py`` calls once patch 0003 is in."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm_kairos.files import UserError
from vllm_kairos.proxy.app import KairosProxy
from vllm_kairos.proxy.flags import ROUND_ROBIN, settings_from_args


def make_proxy(args: argparse.Namespace) -> KairosProxy | None:
    """The proxy the flags ask for.

    Args:
        args: The script's flags, with those of `flags.add_arguments`.

    Returns:
        `None` where they ask for the script's own handlers: plain
        ``round_robin`` without ``--kv-handshake``.

    Raises:
        SystemExit: A flag is wrong; told in one line, exit code 2.
    """
    if args.scheduling_policy == ROUND_ROBIN and args.kv_handshake is None:
        return None
    try:
        return KairosProxy(settings_from_args(args))
    except UserError as error:
        print(f"disagg_proxy_demo.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def handlers(proxy: KairosProxy | None) -> dict[str, Any]:
    """Keyword arguments for the script's ``ProxyServer``."""
    if proxy is None:
        return {}
    return {
        "create_completion": proxy.create_completion,
        "create_chat_completion": proxy.create_chat_completion,
    }
