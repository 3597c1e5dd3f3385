# SPDX-License-Identifier: Apache-2.0
"""What engine and proxy say to each other.

Two messages: the chunk schedule that travels with a request, and the state
report every engine publishes. Both are data from a network: they are checked
here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeGuard

import msgspec

#: Key of the chunk schedule in vLLM's ``kv_transfer_params``.
SCHEDULE_KEY = "kairos"
SCHEDULE_VERSION = 1
#: Key of the ticket of a dispatch that carries no schedule, beside whatever
#: the KV connector reads there; connectors ignore keys they do not know.
TICKET_KEY = "kairos_ticket"
REPORT_VERSION = 1
#: ZMQ topic of state reports.
REPORT_TOPIC = b"kairos-state"

#: What a reader may divide by.
_Positive = Annotated[int, msgspec.Meta(ge=1)]

_MOST_CHUNKS = 65_536
_MOST_TICKET_CHARS = 128
_MOST_SLACK_MS = 1e12


class ChunkSchedule(msgspec.Struct, frozen=True):
    """A chunk schedule as the engine holds it.

    Attributes:
        ticket: Names the dispatch; comes back in state reports.
        chunks: ``[chi_1, ...]``: most tokens of each whole step that carries
            a part of this prefill.
        slack_ms: Time left to its TTFT target when it was dispatched.
    """

    ticket: str
    chunks: tuple[int, ...]
    slack_ms: float | None = None


def schedule_params(
    ticket: str, chunks: Sequence[int], slack_ms: float | None = None
) -> dict[str, Any]:
    """``kv_transfer_params`` of a deflected request.

    Args:
        ticket: Names the dispatch.
        chunks: ``[chi_1, ...]``.
        slack_ms: Time left to its TTFT target when it is dispatched; the
            engine's own target where it is not sent.
    """
    schedule: dict[str, Any] = {
        "v": SCHEDULE_VERSION,
        "ticket": ticket,
        "chunks": list(chunks),
    }
    if slack_ms is not None:
        schedule["slack_ms"] = slack_ms
    return {SCHEDULE_KEY: schedule}


def parse_schedule(params: object) -> ChunkSchedule | None:
    """The chunk schedule in a request's ``kv_transfer_params``.

    Args:
        params: Whatever the client or proxy sent.

    Returns:
        `None` where there is none.

    Raises:
        ValueError: There is one and it is malformed; the message says what
            was expected. No other exception, whatever `params` holds.
    """
    if not isinstance(params, Mapping) or SCHEDULE_KEY not in params:
        return None
    raw = params[SCHEDULE_KEY]
    if not isinstance(raw, Mapping):
        raise ValueError(f"schedule is a {type(raw).__name__}, expected an object")
    version = raw.get("v")
    if type(version) is not int or version != SCHEDULE_VERSION:
        raise ValueError(f"version is {_show(version)}, expected {SCHEDULE_VERSION}")
    ticket = raw.get("ticket")
    if not _is_ticket(ticket):
        raise ValueError(
            f"ticket is not a string of 1 to {_MOST_TICKET_CHARS} ASCII characters"
        )
    chunks = raw.get("chunks")
    if not isinstance(chunks, (list, tuple)) or not 0 < len(chunks) <= _MOST_CHUNKS:
        raise ValueError(f"chunks is not a list of 1 to {_MOST_CHUNKS} integers")
    for chunk in chunks:
        if type(chunk) is not int or chunk < 1:
            raise ValueError(f"chunk is {_show(chunk)}, expected an integer >= 1")
    slack = raw.get("slack_ms")
    if slack is not None and not (
        type(slack) in (int, float) and abs(slack) < _MOST_SLACK_MS
    ):
        raise ValueError(f"slack_ms is {_show(slack)}, expected milliseconds")
    return ChunkSchedule(ticket, tuple(chunks), None if slack is None else float(slack))


def _show(value: object) -> str:
    """A short form of any value: `repr` may recurse too deep or refuse."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int) and abs(value) < 1 << 63:
        return repr(value)
    return f"of type {type(value).__name__}"


def ticket_of(params: object) -> str | None:
    """The ticket in a request's ``kv_transfer_params``, of either kind.

    Never raises: what is not a ticket is none.
    """
    if not isinstance(params, Mapping):
        return None
    schedule = params.get(SCHEDULE_KEY)
    raw = schedule.get("ticket") if isinstance(schedule, Mapping) else None
    ticket = params.get(TICKET_KEY) if raw is None else raw
    return ticket if _is_ticket(ticket) else None


def _is_ticket(value: object) -> TypeGuard[str]:
    """A name that can be sent back: text outside ASCII may not even encode."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _MOST_TICKET_CHARS
        and value.isascii()
    )


class DeflectedReport(msgspec.Struct, frozen=True):
    """One deflected prefill on an engine.

    Attributes:
        ticket: Its dispatch.
        tokens: Prompt tokens left to compute.
        computed: Prompt tokens computed.
    """

    ticket: str
    tokens: int
    computed: int


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine, published every heartbeat.

    Attributes:
        v: `REPORT_VERSION`.
        engine_id: Stable name of the engine.
        incarnation: New for every start of the process.
        seq: Counts up by one a report within an incarnation.
        time_s: Unix time of the report on the engine's clock.
        role: ``kv_producer``, ``kv_consumer``, ``kv_both`` or ``none``.
        decodes: Decode batch size ``B``.
        decode_kv_tokens: Their KV tokens ``K``.
        deflected: Deflected prefills in arrival order, not in `prefills`.
        prefills: ``(tokens left, tokens computed)`` of every other prefill in
            the order served: running ones first, then waiting ones. Cut at
            `MOST_PREFILLS` entries; `more_prefill_tokens` is the rest.
        more_prefill_tokens: Tokens of the prefills cut off.
        awaiting_kv: Requests that wait for remote KV.
        awaiting_kv_tokens: Their prompt tokens.
        free_kv_blocks: Blocks free in the KV cache.
        total_kv_blocks: Blocks it has.
        block_size: Tokens of a block.
        budget_tokens: vLLM ``max_num_scheduled_tokens``.
        max_num_seqs: vLLM ``max_num_seqs``.
        admitted: Tickets the engine has taken since it started, newest last,
            the last `MOST_ADMITTED` of them.
        steps: ``(predicted ms or -1, measured ms)`` of recent steps, newest
            last.
        malformed_schedules: Schedules the engine could not read.
        guard_overrides: Steps that gave a held prefill a chunk although no
            headroom was left.
        step_remaining_ms: Predicted remainder of the step in flight; zero
            while idle or without a profile.
        limit_ms: Bound on a predicted step that carries a prefill beside
            decodes, as the engine's loop has it now; zero where the engine
            splits no prompt, `None` without a profile.
        adaptive: The engine is in ``adaptive`` mode, not in ``planned``; what a
            report that does not tell is taken for.
        errors: By phase (``prefill``, ``decode``, ``mixed``) the mean error
            and the mean absolute error of recent predictions, percent of the
            measured latency.
        prefix_caching: The engine keeps the KV of finished prompts.
        cached: ``(ticket, tokens)``: how much of a prompt, of those it
            computes itself, was found in its cache when it was begun; newest
            last, the last `MOST_ADMITTED` of them.
    """

    engine_id: str
    incarnation: str
    seq: int
    time_s: float
    role: str
    decodes: int
    decode_kv_tokens: int
    deflected: list[DeflectedReport]
    prefills: list[tuple[int, int]]
    more_prefill_tokens: int
    awaiting_kv: int
    awaiting_kv_tokens: int
    free_kv_blocks: int
    total_kv_blocks: int
    block_size: _Positive
    budget_tokens: _Positive
    max_num_seqs: _Positive
    admitted: list[str]
    steps: list[tuple[float, float]]
    malformed_schedules: int = 0
    guard_overrides: int = 0
    step_remaining_ms: float = 0.0
    limit_ms: float | None = None
    adaptive: bool = True
    errors: dict[str, tuple[float, float]] = {}
    prefix_caching: bool = False
    cached: list[tuple[str, int]] = []
    v: int = REPORT_VERSION


MOST_PREFILLS = 1024
MOST_ADMITTED = 256

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateReport)


def encode_report(report: StateReport) -> bytes:
    """A state report as msgpack."""
    return _encoder.encode(report)


def decode_report(data: bytes) -> StateReport:
    """A state report from msgpack.

    Raises:
        ValueError: It is not one, or of another version.
    """
    try:
        report = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"state report: {error}") from error
    if report.v != REPORT_VERSION:
        raise ValueError(f"state report version {report.v}, expected {REPORT_VERSION}")
    return report
