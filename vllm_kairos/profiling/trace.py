# SPDX-License-Identifier: Apache-2.0
"""Prompt and output lengths of a trace to replay; its arrivals are not used."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from vllm_kairos.files import UserError

#: Columns of prompt and of output length, by the traces that use them.
_COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("Request tokens", "Response tokens"),
)


def read_lengths(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """``(prompt, output)`` tokens of every request of a CSV trace.

    Raises:
        UserError: The file cannot be read, has none of the known columns, or
            a row is bad; the message names row and field.
    """
    try:
        with Path(path).open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--trace {path}: {error}") from error
    names = next((c for c in _COLUMNS if rows and c[0] in rows[0]), None)
    if names is None or names[1] not in rows[0]:
        known = " or ".join(", ".join(pair) for pair in _COLUMNS)
        raise UserError(f"--trace {path}: expected a CSV file with columns {known}")
    lengths = []
    for number, row in enumerate(rows, start=2):
        pair = []
        for least, name in zip((1, 0), names, strict=True):
            text = row[name]
            if text is None or not text.strip().isdigit() or int(text) < least:
                raise UserError(
                    f"--trace {path}: row {number}: {name} is {text!r}, expected a "
                    f"whole number >= {least}"
                )
            pair.append(int(text))
        lengths.append((pair[0], pair[1]))
    return lengths
