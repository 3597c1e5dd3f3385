# SPDX-License-Identifier: Apache-2.0
"""What vLLM's bundled ``disagg_proxy_demo.py`` calls once patch 0003 is in."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from vllm_kairos.files import UserError
from vllm_kairos.proxy.app import KairosProxy
from vllm_kairos.proxy.command import listen
from vllm_kairos.proxy.flags import settings_from_args
from vllm_kairos.proxy.prompt_length import load_tokenizers_alone


def make_server(proxy_server: Callable[..., Any], args: argparse.Namespace) -> Any:
    """The script's server with its two request handlers handed to Kairos.

    Args:
        proxy_server: The script's ``ProxyServer``.
        args: The script's flags, with those of `flags.add_arguments`.

    Returns:
        The server, not yet running.

    Raises:
        SystemExit: A flag is wrong, a node does not answer or serves another
            model, or the port is taken; told in one line, exit code 2.
    """
    try:
        kairos = KairosProxy(settings_from_args(args))
        # The script lets uvicorn bind, which says less when it fails.
        listen("127.0.0.1", args.port).close()
        server = proxy_server(
            args=args,
            create_completion=kairos.create_completion,
            create_chat_completion=kairos.create_chat_completion,
        )
    except (UserError, ValueError) as error:
        print(f"disagg_proxy_demo.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    load_tokenizers_alone()
    server.proxy_instance.router.include_router(kairos.router)
    return server
