# SPDX-License-Identifier: Apache-2.0
"""Flags that were given and that nobody reads.

After parsing, a flag left out and one given its default look alike; whether a
flag was given in vain can only be told by what the user wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any

from vllm_kairos.files import UserError


def given_flags(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> dict[str, str]:
    """The flags among the arguments of a command.

    Args:
        parser: Of that command.
        words: Arguments it takes.

    Returns:
        The flag in full by its attribute in the namespace; of what is given
        without a flag, what the help calls it.
    """
    # A list, because that is what an action that appends takes a default for.
    left_out: list[Any] = []
    actions = {action.dest: action for action in parser._actions}
    found = argparse.Namespace(**dict.fromkeys(actions, left_out))
    argparse.ArgumentParser.parse_args(parser, words, found)
    given: dict[str, str] = {}
    for name, action in actions.items():
        value = getattr(found, name)
        if action.option_strings:
            if value is not left_out:
                given[name] = max(action.option_strings, key=len)
        elif value:
            # "*" gives an empty list where there is none.
            given[name] = str(action.metavar or name)
    return given


def refuse_unread(
    args: argparse.Namespace,
    where: str,
    unread: Collection[str] = (),
    *,
    read: Collection[str] | None = None,
) -> None:
    """Refuse a flag that what was asked for does not read.

    Args:
        args: Parsed by the command line, which notes in ``given`` what was
            given; where somebody else parsed, nothing is known and refused.
        where: What was asked for, as "with --capacity".
        unread: Attributes of `args` that it does not read.
        read: Those it does read, in place of `unread`.

    Raises:
        UserError: Names both flags.
    """
    given: dict[str, str] = getattr(args, "given", {})
    for name, flag in given.items():
        if name in unread if read is None else name not in read:
            raise UserError(f"{flag} is not used {where}, expected it left out")
