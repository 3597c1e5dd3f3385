# SPDX-License-Identifier: Apache-2.0
"""Request traces: the public formats, read and checked.

========  ==================================================================
Azure     CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (AzurePublicDataset)
Vidur     CSV ``arrived_at,num_prefill_tokens,num_decode_tokens``, seconds
BurstGPT  CSV with ``Timestamp``, ``Request tokens``, ``Response tokens``
Mooncake  JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``,
          ``hash_ids`` of 512-token blocks
========  ==================================================================
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_kairos.files import UserError

logger = logging.getLogger(__name__)

#: Tokens one of Mooncake's ``hash_ids`` stands for.
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a workload.

    Attributes:
        arrived_at_s: Arrival, seconds from the start of the trace.
        prompt_tokens: Prompt length.
        output_tokens: Output length, at least 1.
        hash_ids: Ids of the prompt's blocks of `hash_block_tokens`; equal ids
            mean an equal prefix up to and with that block. Empty where
            prefixes are not known.
        hash_block_tokens: Tokens of one such block.
        session: Conversation, if known.
        turn: Turn within it, starting at 1.
    """

    arrived_at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: str | None = None
    turn: int = 1


class _Row:
    """One raw row with its place, for errors that name both."""

    __slots__ = ("path", "line", "fields")

    def __init__(self, path: str, line: int, fields: dict[str, Any]):
        self.path = path
        self.line = line
        self.fields = fields

    def bad(self, field: str, expected: str) -> UserError:
        got = self.fields.get(field)
        said = "is missing" if got is None else f"is {got!r:.60}"
        return UserError(
            f"{self.path}:{self.line}: {field} {said}, expected {expected}"
        )

    def number(self, field: str) -> float:
        value = self.fields.get(field)
        expected = "a number >= 0"
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self.bad(field, expected)
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise self.bad(field, expected) from None
        if not (math.isfinite(number) and number >= 0):
            raise self.bad(field, expected)
        return number

    def tokens(self, field: str, least: int = 1) -> int:
        value = self.fields.get(field)
        expected = f"an integer >= {least}"
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise self.bad(field, expected)
        try:
            count = int(value)
        except ValueError:
            raise self.bad(field, expected) from None
        if count < least:
            raise self.bad(field, expected)
        return count

    def time_of_day_s(self, field: str) -> float:
        """Seconds since the epoch of an Azure timestamp (7 decimals)."""
        value = self.fields.get(field)
        expected = "a time as 2023-11-16 18:17:03.9799600"
        if not isinstance(value, str):
            raise self.bad(field, expected)
        head, _, decimals = value.strip().partition(".")
        decimals = decimals.removesuffix("Z").partition("+")[0]
        try:
            whole = datetime.fromisoformat(head.removesuffix("Z") + "+00:00")
            part = float(f"0.{decimals}") if decimals else 0.0
        except ValueError:
            raise self.bad(field, expected) from None
        return whole.timestamp() + part


def _azure(row: _Row) -> TraceRow:
    return TraceRow(
        row.time_of_day_s("TIMESTAMP"),
        row.tokens("ContextTokens"),
        row.tokens("GeneratedTokens"),
    )


def _vidur(row: _Row) -> TraceRow:
    return TraceRow(
        row.number("arrived_at"),
        row.tokens("num_prefill_tokens"),
        row.tokens("num_decode_tokens"),
    )


def _burstgpt(row: _Row) -> TraceRow | None:
    output = row.tokens("Response tokens", least=0)
    prompt = row.tokens("Request tokens", least=0)
    if output == 0 or prompt == 0:
        # A failed request, as the data set marks it.
        return None
    return TraceRow(row.number("Timestamp"), prompt, output)


_CSV = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    (("arrived_at", "num_prefill_tokens", "num_decode_tokens"), _vidur),
    (("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
)


def load_trace(path: str | os.PathLike[str]) -> list[TraceRow]:
    """The requests of a trace file, by arrival, the first at 0 s.

    The format is recognised by the header (CSV) or the first character
    (JSON lines).

    Raises:
        UserError: The file cannot be read, is of no known format or empty, or
            a row is bad; the message says file, line, field, what was there
            and what was expected.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text: {error.reason}") from error
    if text.lstrip().startswith("{"):
        rows = spread_ticks(sorted(_mooncake(name, text), key=_arrival))
        rows = conversations(rows)
    else:
        rows = sorted(_csv(name, text), key=_arrival)
    if not rows:
        raise UserError(f"{name}: no requests in it")
    start = rows[0].arrived_at_s
    return [replace(row, arrived_at_s=row.arrived_at_s - start) for row in rows]


def _arrival(row: TraceRow) -> float:
    return row.arrived_at_s


def _csv(name: str, text: str) -> Iterator[TraceRow]:
    reader = csv.reader(text.splitlines())
    header = [field.strip() for field in next(reader, [])]
    parse = next((p for needed, p in _CSV if set(needed) <= set(header)), None)
    if parse is None:
        raise UserError(
            f"{name}:1: header is {','.join(header)!r:.80}, expected the columns "
            + " or ".join(",".join(fields) for fields, _ in _CSV)
        )
    twice = [c for c in dict.fromkeys(header) if c and header.count(c) > 1]
    if twice:
        raise UserError(f"{name}:1: column {twice[0]!r} is there twice, expected once")
    skipped = 0
    some = False
    for cells in _rows(name, reader):
        if not cells:
            continue
        raw = _Row(name, reader.line_num, dict(zip(header, cells, strict=False)))
        row = parse(raw)
        if row is None:
            skipped += 1
        else:
            some = True
            yield row
    if skipped and some:
        logger.warning("%s: left out %d failed requests", name, skipped)


def _rows(name: str, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num}: not CSV ({error})") from error


def _mooncake(name: str, text: str) -> Iterator[TraceRow]:
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            fields = json.loads(content)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{name}:{line}: not JSON ({error.msg}), expected an object a line"
            ) from error
        except (RecursionError, ValueError) as error:
            # Nested without end, or a number of thousands of digits.
            raise UserError(
                f"{name}:{line}: not JSON that can be read, expected an object a line"
            ) from error
        if not isinstance(fields, dict):
            raise UserError(f"{name}:{line}: not an object, expected one a line")
        row = _Row(name, line, fields)
        prompt = row.tokens("input_length")
        ids = fields.get("hash_ids", [])
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise row.bad("hash_ids", "a list of integers")
        if ids and len(ids) != -(-prompt // MOONCAKE_BLOCK_TOKENS):
            raise UserError(
                f"{name}:{line}: hash_ids has {len(ids)} ids, expected one for each "
                f"{MOONCAKE_BLOCK_TOKENS} of {prompt} prompt tokens"
            )
        yield TraceRow(
            row.number("timestamp") / 1e3,
            prompt,
            row.tokens("output_length"),
            tuple(ids),
        )


def spread_ticks(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Rows with requests of one timestamp spread evenly up to the next one.

    Mooncake's clock ticks every few seconds: taken literally, each tick is a
    burst that never happened.

    Args:
        rows: Sorted by arrival.
    """
    out: list[TraceRow] = []
    start = 0
    width = 0.0
    while start < len(rows):
        end = start
        now = rows[start].arrived_at_s
        while end < len(rows) and rows[end].arrived_at_s == now:
            end += 1
        if end < len(rows):
            # The last tick has no next one and keeps the width before it.
            width = rows[end].arrived_at_s - now
        for place, row in enumerate(rows[start:end]):
            at = now + width * place / (end - start)
            out.append(replace(row, arrived_at_s=at))
        start = end
    return out


def conversations(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Rows with `session` and `turn` found from their block hashes.

    A prompt that holds every full block of an earlier prompt continues it. One
    block alone is a shared system prompt, not a conversation.

    Args:
        rows: Sorted by arrival.
    """
    newest: dict[int, tuple[str, int]] = {}
    out: list[TraceRow] = []
    for index, row in enumerate(rows):
        session, turn = f"s{index}", 1
        for block in reversed(row.hash_ids):
            if block in newest:
                session, turn = newest[block][0], newest[block][1] + 1
                break
        full = row.prompt_tokens // row.hash_block_tokens
        if full > 1 and row.hash_ids:
            newest[row.hash_ids[full - 1]] = (session, turn)
        out.append(replace(row, session=session, turn=turn) if row.hash_ids else row)
    return out
