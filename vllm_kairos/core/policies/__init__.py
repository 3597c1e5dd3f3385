# SPDX-License-Identifier: Apache-2.0
"""Routing policies, by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from vllm_kairos.core.policies.base import Policy, RoundRobin, policies, register
from vllm_kairos.core.settings import Settings

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def make_policy(name: str, settings: Settings, **options: object) -> Policy:
    """A policy by name.

    Args:
        name: One of `policies()`.
        settings: SLOs and margins.
        **options: The policy's own settings.

    Raises:
        ValueError: No policy or no setting has that name; the known ones are
            listed.
    """
    known = policies()
    if name not in known:
        raise ValueError(f"unknown policy {name!r}, expected one of {sorted(known)}")
    own = list(inspect.signature(known[name].__init__).parameters)[2:]
    for option in options:
        if option not in own:
            raise ValueError(
                f"policy {name!r} has no setting {option!r}, expected one of {own}"
            )
    return known[name](settings, **options)


__all__ = ["Policy", "RoundRobin", "make_policy", "policies", "register"]
