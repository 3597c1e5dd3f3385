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


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
}


def _check_type(option: str, value: object, annotation: str) -> None:
    """Raise `ValueError` unless a setting has the type its policy asks for."""
    if annotation not in _KINDS:
        return
    types, expected = _KINDS[annotation]
    if isinstance(value, bool) != (annotation == "bool") or not isinstance(
        value, types
    ):
        raise ValueError(f"{option} is {value!r}, expected {expected}")


def make_policy(name: str, settings: Settings, **options: object) -> Policy:
    """A policy by name.

    Args:
        name: One of `policies()`.
        settings: SLOs and margins.
        **options: The policy's own settings.

    Raises:
        ValueError: No policy or no setting has that name, the known ones are
            listed; or a value is not one the policy takes.
    """
    known = policies()
    if name not in known:
        raise ValueError(f"unknown policy {name!r}, expected one of {sorted(known)}")
    signature = inspect.signature(known[name].__init__).parameters
    own = list(signature)[2:]
    for option, value in options.items():
        if option not in own:
            raise ValueError(
                f"policy {name!r} has no setting {option!r}, expected one of {own}"
            )
        _check_type(option, value, str(signature[option].annotation))
    return known[name](settings, **options)


__all__ = ["Policy", "RoundRobin", "make_policy", "policies", "register"]
