# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import statistics

import pytest

from vllm_kairos.profiling import plan

BOUNDS = plan.Bounds(max_model_len=16384, kv_tokens=200_000, max_num_seqs=64)


def test_the_grid_holds_the_papers_figure_1():
    cells = plan.grid_cells(BOUNDS)
    assert {c.decodes for c in cells} >= {1, 8, 32}
    assert all(c.decodes < BOUNDS.max_num_seqs for c in cells)
    whole = cells[0].prompts(1e9)
    assert {chi[0] for chi in whole[:-1]} >= {128, 256, 512, 1024, 2048}
    assert all(len(chi) == plan.SUCCESSIVE_CHUNKS for chi in whole[:-1])
    assert all(len(set(chi)) == 1 for chi in whole[:-1])


@pytest.mark.parametrize("tokens", [992, 1500, 4096, 16_000])
def test_a_ladder_has_every_small_chunk_early_and_deep_in_the_prompt(tokens):
    chunks = plan.ladder(tokens)
    assert sum(chunks) == tokens
    assert max(chunks) <= plan.CHUNK_SIZES[-1]
    ends = list(itertools.accumulate(chunks))
    for size in plan.RUNG:
        starts = [end - size for end, c in zip(ends, chunks, strict=True) if c == size]
        assert min(starts) <= sum(plan.RUNG)
        assert max(starts) >= tokens - sum(plan.RUNG)


def test_small_chunks_of_a_long_prefix_are_seen_with_and_without_decodes():
    alone = [c for c in plan.alone_cells(BOUNDS)[:3] if 16 in c.chunks]
    assert alone and alone[0].prompt_tokens >= 8192
    for cell in plan.grid_cells(BOUNDS):
        climb = cell.prompts(1e9)[-1]
        assert climb == tuple(
            chunk + cell.decodes
            for chunk in plan.ladder(
                sum(climb) - len(climb) * cell.decodes,
                plan.CHUNK_SIZES[-1] - cell.decodes,
            )
        )


def test_no_cell_asks_for_more_than_the_engine_has():
    small = plan.Bounds(max_model_len=1024, kv_tokens=4096, max_num_seqs=8)
    cells = plan.grid_cells(small)
    assert cells
    for cell in cells:
        assert cell.decodes * cell.context_tokens <= small.kv_tokens
        for chi in cell.prompts(1e9):
            assert min(chi) > cell.decodes
            assert sum(chi) - len(chi) * cell.decodes < small.max_model_len
    assert all(c.prompt_tokens < small.max_model_len for c in plan.alone_cells(small))


def test_the_first_cells_already_span_batch_and_context():
    first = plan.grid_cells(BOUNDS)[:3]
    assert len({c.decodes for c in first}) > 1
    assert len({c.context_tokens for c in first}) > 1
    alone = [c.prompt_tokens for c in plan.alone_cells(BOUNDS)[:4]]
    assert min(alone) == 16
    assert max(alone) >= 8192


def test_a_cell_with_little_time_runs_fewer_chunks_but_never_none():
    cell = plan.grid_cells(BOUNDS)[0]
    few = cell.prompts(cell.setup_tokens + 1500)
    assert 0 < sum(sum(chi) - len(chi) * cell.decodes for chi in few) < 6000
    assert cell.prompts(0.0)


def test_arrivals_have_the_asked_rate_and_are_the_same_for_the_same_seed():
    args = (5.0, 2000.0, 400, 20, BOUNDS)
    requests = plan.arrivals(*args, seed="a")
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    assert requests == plan.arrivals(*args, seed="a")
    assert requests != plan.arrivals(*args, seed="b")
    assert statistics.median(r.prompt_tokens for r in requests) == pytest.approx(
        400, rel=0.06
    )
    assert max(r.prompt_tokens for r in requests) <= BOUNDS.max_model_len // 2
    assert {r.chi for r in requests} == {0, *plan.CHUNK_SIZES}


def test_a_trace_gives_the_lengths():
    requests = plan.arrivals(
        50.0, 10.0, 400, 20, BOUNDS, seed="a", lengths=[(100, 7), (200, 9)]
    )
    pairs = {(r.prompt_tokens, r.output_tokens) for r in requests}
    assert pairs == {(100, 7), (200, 9)}
