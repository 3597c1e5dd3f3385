# SPDX-License-Identifier: Apache-2.0
"""Step records in: CSV files checked row by row.

A file of the engine's own recorder and any other file with the same columns
read alike; columns that are not known are left alone.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_kairos.core.predictor import Array, feature_matrix
from vllm_kairos.files import UserError

#: Columns a step record must have, with the letter each is known by.
COLUMNS = {
    "sum_prefill_tokens": "c",
    "num_prefill_requests": "n",
    "sum_prefill_kv_tokens": "p",
    "num_decode_requests": "B",
    "sum_decode_kv_tokens": "K",
    "latency_ms": "ms",
}

#: Columns that name the engine a step ran on, the first present is used.
_ENGINE_COLUMNS = ("engine_id", "worker_id")

#: Columns that tell two steps of one engine apart.
_STEP_COLUMNS = ("step", "counter_id", "time_s", "dp_rank")

#: Without a step number, equal rows are chance up to this share of a file.
_MOST_EQUAL_SHARE = 0.05
_FEWEST_EQUAL_ROWS = 10

#: Columns of a log composed of single measurements.
_COMPOSED_COLUMNS = (
    "prefill_tokens",
    "cached_tokens",
    "decode_batch",
    "decode_context",
    "step_ms",
)

#: Half of an engine's steps are never shorter than this.
_LEAST_MEDIAN_MS, _FEWEST_FOR_UNIT = 0.1, 20

#: A step longer than this is a stopped process or a wrong unit, one shorter
#: than this is no step.
_LONGEST_STEP_MS, _SHORTEST_STEP_MS = 3.6e6, 1e-4

#: No engine runs more requests in a step, or tokens over all of them.
_MOST_REQUESTS, _MOST_TOKENS = 65_536, 10**9


@dataclass(frozen=True)
class Steps:
    """Step records as arrays of one length.

    Attributes:
        decodes: ``B``, requests that decode.
        decode_kv_tokens: ``K``, their KV tokens.
        prefill_tokens: ``c``, prefill tokens computed.
        prefill_kv_tokens: ``p``, tokens those prefills had computed before.
        prefills: ``n``, requests that prefill.
        latency_ms: Measured latency.
    """

    decodes: Array
    decode_kv_tokens: Array
    prefill_tokens: Array
    prefill_kv_tokens: Array
    prefills: Array
    latency_ms: Array

    def __len__(self) -> int:
        return int(self.latency_ms.size)

    @property
    def is_decode(self) -> npt.NDArray[np.bool_]:
        """Steps with decodes only."""
        return (self.decodes > 0) & (self.prefill_tokens <= 0)

    @property
    def is_prefill(self) -> npt.NDArray[np.bool_]:
        """Steps with prefills only."""
        return (self.decodes <= 0) & (self.prefill_tokens > 0)

    @property
    def is_mixed(self) -> npt.NDArray[np.bool_]:
        """Steps with both."""
        return (self.decodes > 0) & (self.prefill_tokens > 0)

    def phase(self, name: str) -> npt.NDArray[np.bool_]:
        """Steps of ``prefill``, ``decode`` or ``mixed``."""
        mask: npt.NDArray[np.bool_] = getattr(self, f"is_{name}")
        return mask

    def features(self) -> Array:
        """Columns of `predictor.TERMS`, shape ``(steps, terms)``."""
        return feature_matrix(
            self.decodes,
            self.decode_kv_tokens,
            self.prefill_tokens,
            self.prefill_kv_tokens,
            self.prefills,
        )

    def letters(self) -> dict[str, Array]:
        """The quantities by the letters of `step_model`."""
        return {
            "B": self.decodes,
            "K": self.decode_kv_tokens,
            "c": self.prefill_tokens,
            "p": self.prefill_kv_tokens,
            "n": self.prefills,
        }

    def take(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Steps:
        """Some of the steps."""
        return Steps(
            self.decodes[rows],
            self.decode_kv_tokens[rows],
            self.prefill_tokens[rows],
            self.prefill_kv_tokens[rows],
            self.prefills[rows],
            self.latency_ms[rows],
        )


def steps_of(rows: Sequence[Sequence[float]]) -> Steps:
    """Steps from rows of ``(B, K, c, p, n, latency_ms)``."""
    table = np.asarray(rows, dtype=np.float64).reshape(len(rows), 6)
    return Steps(*(table[:, i] for i in range(6)))


def concatenate(parts: Sequence[Steps]) -> Steps:
    """All steps of several logs, in order."""
    return Steps(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in (
                "decodes",
                "decode_kv_tokens",
                "prefill_tokens",
                "prefill_kv_tokens",
                "prefills",
                "latency_ms",
            )
        )
    )


def read_steps(
    paths: Sequence[str | os.PathLike[str]], engine: str | None = None
) -> Steps:
    """Step records of one or more CSV files.

    Args:
        paths: Files; each holds one engine's steps.
        engine: Take this engine's rows only, where a file holds several.

    Raises:
        UserError: A file cannot be read or a row is not a step record; the
            message names file, row and field and what was expected.
    """
    if not paths:
        raise UserError("no step files given, expected at least one CSV file")
    seen: dict[tuple[str, ...], str] = {}
    return concatenate([_read_file(Path(path), engine, seen) for path in paths])


def read_live_steps(path: str | os.PathLike[str]) -> Steps:
    """Step records of a log that an engine is still writing.

    A last line that is not finished is left for the next time.
    """
    target = Path(path)
    text = _text(target)
    complete = text[: text.rfind("\n") + 1]
    return _parse(complete, str(target), None, {})


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"steps {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"steps {path}: byte {error.start} is not UTF-8, expected a CSV file"
        ) from error


def _read_file(
    path: Path, engine: str | None, seen: dict[tuple[str, ...], str]
) -> Steps:
    return _parse(_text(path), str(path), engine, seen)


def _parse(
    text: str, name: str, engine: str | None, seen: dict[tuple[str, ...], str]
) -> Steps:
    if not text.strip():
        raise UserError(f"steps {name}: the file is empty, expected a header row")
    rows = _composed(_rows(text, name), name)
    header = [cell.strip() for cell in rows[0]]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise UserError(
            f"steps {name}: row 1: missing column{'s' * (len(missing) > 1)} "
            f"{', '.join(missing)}, expected a header with {', '.join(COLUMNS)}"
        )
    twice = sorted({column for column in COLUMNS if header.count(column) > 1})
    if twice:
        raise UserError(f"steps {name}: row 1: column {twice[0]} stands there twice")
    if not text.endswith("\n"):
        _check_last_row(rows, name)
    where = {letter: header.index(column) for column, letter in COLUMNS.items()}
    owner = next((c for c in _ENGINE_COLUMNS if c in header), None)
    owner_at = header.index(owner) if owner else -1
    keys_at = [header.index(c) for c in _STEP_COLUMNS if c in header]
    numbered = any(c in header for c in ("step", "counter_id", "time_s"))
    first_owner: str | None = None
    table: list[tuple[float, ...]] = []
    equal = 0
    known: set[tuple[float, ...]] = set()
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise UserError(
                f"steps {name}: row {number}: {len(row)} fields, expected "
                f"{len(header)}"
                + (": the file is cut short" if number == len(rows) else "")
            )
        if owner is not None:
            value = row[owner_at]
            if engine is not None and value != engine:
                continue
            if first_owner is None:
                first_owner = value
            elif value != first_owner:
                raise UserError(
                    f"steps {name}: row {number}: {owner} is {value!r}, the rows "
                    f"before are of {first_owner!r}: expected one engine a file, "
                    "or --engine to choose one"
                )
        values = tuple(
            _number(row[at], name, number, header[at], letter)
            for letter, at in where.items()
        )
        step = dict(zip(where, values, strict=True))
        _check_row(step, name, number)
        if numbered:
            key = (row[owner_at] if owner else name, *(row[at] for at in keys_at))
            place = f"{name}: row {number}"
            if key in seen:
                raise UserError(
                    f"steps {place}: repeats {seen[key]} (same engine and step), "
                    "expected every step once"
                )
            seen[key] = f"{name} row {number}"
        else:
            equal += values in known
            known.add(values)
        table.append(tuple(step[letter] for letter in ("B", "K", "c", "p", "n", "ms")))
    if engine is not None and owner is None:
        raise UserError(
            f"steps {name}: no column {' or '.join(_ENGINE_COLUMNS)}, which "
            "--engine needs"
        )
    if not table:
        raise UserError(
            f"steps {name}: no step records"
            + (f" of engine {engine!r}" if engine is not None else "")
            + ", expected at least one"
        )
    if equal >= _FEWEST_EQUAL_ROWS and equal > _MOST_EQUAL_SHARE * len(table):
        raise UserError(
            f"steps {name}: {equal} of {len(table)} rows repeat an earlier row, "
            "expected every step once"
        )
    steps = steps_of(table)
    median = float(np.median(steps.latency_ms))
    if len(steps) >= _FEWEST_FOR_UNIT and median < _LEAST_MEDIAN_MS:
        raise UserError(
            f"steps {name}: the median of latency_ms is {median:g}, expected "
            "milliseconds: are these seconds?"
        )
    return steps


def _rows(text: str, name: str) -> list[list[str]]:
    rows = []
    try:
        for row in csv.reader(io.StringIO(text), strict=True):
            rows.append(row)
    except csv.Error as error:
        raise UserError(
            f"steps {name}: row {len(rows) + 1}: not CSV: {error}"
        ) from error
    return rows


def _composed(rows: list[list[str]], name: str) -> list[list[str]]:
    """Rows of one prefill beside equal decodes, in the columns of the others.

    Such a log has the context of one decode and no count of prefills.
    """
    header = [cell.strip() for cell in rows[0]]
    if not set(_COMPOSED_COLUMNS) <= set(header):
        return rows
    at = [header.index(column) for column in _COMPOSED_COLUMNS]
    translated = [list(COLUMNS)]
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            translated.append(row)
            continue
        if len(row) != len(header):
            raise UserError(
                f"steps {name}: row {number}: {len(row)} fields, expected {len(header)}"
            )
        chunk, prefix, batch, context, ms = (row[i] for i in at)
        prefills = "0" if chunk.strip() == "0" else "1"
        try:
            kv = str(int(batch) * int(context))
        except ValueError:
            kv = f"{batch} x {context}"
        translated.append([chunk, prefills, prefix, batch, kv, ms])
    return translated


def _check_last_row(rows: list[list[str]], name: str) -> None:
    """Refuse a last value that lost its end with the rest of the file."""
    if len(rows) < 3 or len(rows[-1]) != len(rows[-2]):
        return  # The count of fields is checked with every other row's.
    decimals = [len(row[-1].partition(".")[2]) for row in rows[1:-1] if row]
    if len(rows[-1][-1].partition(".")[2]) < min(decimals):
        raise UserError(
            f"steps {name}: row {len(rows)}: the file is cut short inside "
            f"{rows[-1][-1]!r}, expected a complete last row"
        )


def _number(text: str, name: str, number: int, column: str, letter: str) -> float:
    try:
        # Python's own spelling of numbers in code is none of a log's.
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if letter == "ms":
        good = _SHORTEST_STEP_MS <= value <= _LONGEST_STEP_MS
    else:
        most = _MOST_REQUESTS if letter in ("B", "n") else _MOST_TOKENS
        good = 0 <= value <= most and value == int(value)
    if not good:
        expected = (
            f"a latency > 0, {_SHORTEST_STEP_MS:g} to {_LONGEST_STEP_MS:g} ms"
            if letter == "ms"
            else f"a whole number >= 0, at most {most}"
        )
        raise UserError(
            f"steps {name}: row {number}: {column} is {text!r}, expected {expected}"
        )
    return value


def _check_row(step: dict[str, float], name: str, number: int) -> None:
    for tokens, requests, words in (
        ("c", "n", ("sum_prefill_tokens", "num_prefill_requests")),
        ("K", "B", ("sum_decode_kv_tokens", "num_decode_requests")),
    ):
        if step[tokens] > 0 and step[requests] == 0:
            raise UserError(
                f"steps {name}: row {number}: {words[0]} is {step[tokens]:.0f} and "
                f"{words[1]} is 0, expected at least one request"
            )
