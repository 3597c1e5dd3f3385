# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiling.synthetic import COLUMNS, step_rows, synthetic_steps, write_steps
from vllm_kairos.files import UserError
from vllm_kairos.profiling.steps import read_live_steps, read_steps

SIX = (
    "sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,"
    "num_decode_requests,sum_decode_kv_tokens,latency_ms"
)


def _file(tmp_path: Path, *rows: str, header: str = COLUMNS, end: str = "\n") -> Path:
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([header, *rows]) + end)
    return path


def test_a_log_reads_back_as_it_was_written(tmp_path):
    steps = synthetic_steps(50)
    back = read_steps([write_steps(tmp_path / "a.csv", steps)])
    assert back.prefill_tokens.tolist() == steps.prefill_tokens.tolist()
    assert back.decode_kv_tokens.tolist() == steps.decode_kv_tokens.tolist()
    assert back.latency_ms == pytest.approx(steps.latency_ms, abs=1e-4)
    assert (back.is_decode | back.is_prefill | back.is_mixed).all()


def test_unknown_columns_and_their_order_do_not_matter(tmp_path):
    path = _file(
        tmp_path,
        "7.5,x,20,1,0,1000,3",
        header="latency_ms,colour,sum_prefill_tokens,num_prefill_requests,"
        "sum_prefill_kv_tokens,sum_decode_kv_tokens,num_decode_requests",
    )
    steps = read_steps([path])
    assert (steps.latency_ms[0], steps.decodes[0], steps.prefill_tokens[0]) == (
        7.5,
        3,
        20,
    )


def test_carriage_returns_of_a_csv_writer_are_read(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_bytes(f"{SIX}\r\n0,0,0,1,64,7.5\r\n".encode())
    assert len(read_steps([path])) == 1


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{SIX}\n0,0,0,1,64,7.5\n".encode())
    assert len(read_steps([path])) == 1


GOOD = "e,1,10.0,0,0,0,2,200,12.5"


@pytest.mark.parametrize(
    ("row", "field", "expected"),
    [
        ("e,2,11.0,0,0,0,2,200,nan", "latency_ms is 'nan'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,200,0", "latency_ms is '0'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,200,-3.5", "latency_ms is '-3.5'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,200,inf", "latency_ms is 'inf'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,200,fast", "latency_ms is 'fast'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,200,1e-300", "latency_ms is '1e-300'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,200,1_7.5", "latency_ms is '1_7.5'", "a latency > 0"),
        ("e,2,11.0,0,0,0,2,1e18,9.0", "sum_decode_kv_tokens is '1e18'", "at most"),
        ("e,2,11.0,0,0,0,100000000,200,9.0", "num_decode_requests", "at most"),
        ("e,2,11.0,nan,1,0,2,200,9.0", "sum_prefill_tokens is 'nan'", "whole number"),
        ("e,2,11.0,0,0,0,-1,200,9.0", "num_decode_requests is '-1'", "whole number"),
        ("e,2,11.0,0,0,0,2,20.5,9.0", "sum_decode_kv_tokens is '20.5'", "whole number"),
        ("e,2,11.0,64,0,0,2,200,9.0", "sum_prefill_tokens is 64", "at least one"),
        ("e,2,11.0,0,0,0,2,200", "8 fields", "expected 9"),
        ("f,2,11.0,0,0,0,2,200,9.0", "engine_id is 'f'", "one engine a file"),
        (GOOD, "repeats", "every step once"),
    ],
)
def test_a_bad_row_is_named_with_its_field_and_what_was_expected(
    tmp_path, row, field, expected
):
    path = _file(tmp_path, GOOD, row)
    with pytest.raises(UserError) as caught:
        read_steps([path])
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "row 3" in message
    assert field in message
    assert expected in message


def test_a_quote_left_open_is_told_with_its_row(tmp_path):
    path = _file(tmp_path, GOOD, 'e,2,11.0,0,0,0,2,"200,12.5', "e,3,12.0,0,0,0,2,9,1")
    with pytest.raises(UserError, match=r"steps\.csv: row 3: not CSV"):
        read_steps([path])


def test_seconds_are_not_taken_for_milliseconds(tmp_path):
    steps = synthetic_steps(50)
    steps.latency_ms[:] /= 1000.0
    with pytest.raises(UserError, match=r"median of latency_ms.*are these seconds"):
        read_steps([write_steps(tmp_path / "s.csv", steps)])


COMPOSED = (
    "kind,prefill_tokens,cached_tokens,decode_batch,decode_context,chi,chunk_index,"
    "step_ms"
)


def test_a_composed_log_reads_as_steps(tmp_path):
    path = _file(
        tmp_path,
        "decode,0,0,4,842,0,0,15.49",
        "mixed,124,248,4,842,128,3,37.079",
        "prefill,512,0,0,0,512,1,40.5",
        header=COMPOSED,
    )
    steps = read_steps([path])
    assert steps.decodes.tolist() == [4, 4, 0]
    assert steps.decode_kv_tokens.tolist() == [3368, 3368, 0]
    assert steps.prefill_tokens.tolist() == [0, 124, 512]
    assert steps.prefill_kv_tokens.tolist() == [0, 248, 0]
    assert steps.prefills.tolist() == [0, 1, 1]
    assert steps.latency_ms.tolist() == [15.49, 37.079, 40.5]


def test_a_bad_row_of_a_composed_log_is_named(tmp_path):
    path = _file(tmp_path, "decode,0,0,4,many,0,0,15.49", header=COMPOSED)
    with pytest.raises(UserError, match="row 2: sum_decode_kv_tokens is '4 x many'"):
        read_steps([path])
    path = _file(tmp_path, "decode,0,0,4,842,0,0", header=COMPOSED)
    with pytest.raises(UserError, match="row 2: 7 fields, expected 8"):
        read_steps([path])


def test_missing_columns_are_all_named(tmp_path):
    path = _file(tmp_path, "1,2", header="num_decode_requests,latency_ms")
    with pytest.raises(UserError, match=r"sum_prefill_tokens.*sum_decode_kv_tokens"):
        read_steps([path])


def test_one_engine_of_a_log_of_two_can_be_chosen(tmp_path):
    path = _file(tmp_path, GOOD, "f,1,10.0,0,0,0,4,900,14.5")
    assert read_steps([path], engine="f").decodes.tolist() == [4]
    with pytest.raises(UserError, match="no step records of engine 'g'"):
        read_steps([path], engine="g")


def test_a_restarted_engine_may_count_its_steps_anew(tmp_path):
    path = _file(tmp_path, GOOD, "e,1,99.0,0,0,0,2,200,12.5")
    assert len(read_steps([path])) == 2


def test_the_same_file_twice_is_refused(tmp_path):
    path = _file(tmp_path, GOOD)
    with pytest.raises(UserError, match="repeats"):
        read_steps([path, path])


def test_equal_rows_without_a_step_number_are_chance_until_there_are_many(tmp_path):
    distinct = [f"0,0,0,2,{200 + i},9.5" for i in range(300)]
    path = _file(tmp_path, *distinct, distinct[0], header=SIX)
    assert len(read_steps([path])) == 301
    path = _file(tmp_path, *distinct, *distinct, header=SIX)
    with pytest.raises(UserError, match="300 of 600 rows repeat"):
        read_steps([path])


def test_a_file_cut_short_at_any_byte_of_its_last_row_is_refused(tmp_path):
    rows = step_rows(synthetic_steps(5))
    whole = "\n".join([COLUMNS, *rows])
    for cut in range(len(rows[-1]) - 1):
        path = tmp_path / "cut.csv"
        path.write_text(whole[: len(whole) - 1 - cut])
        with pytest.raises(UserError, match=r"cut short|expected 9"):
            read_steps([path])


def test_a_complete_last_row_needs_no_newline(tmp_path):
    path = _file(tmp_path, GOOD, "e,2,11.0,0,0,0,2,200,12.5", end="")
    assert len(read_steps([path])) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (COLUMNS.encode() + b"\n", "no step records"),
        (b'{"a": 1}\n', "missing columns"),
    ],
)
def test_what_is_no_step_log_is_refused(tmp_path, content, message):
    path = tmp_path / "steps.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_steps([path])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.csv"):
        read_steps([tmp_path / "nowhere.csv"])


def test_a_log_still_being_written_is_read_up_to_its_last_whole_row(tmp_path):
    path = _file(tmp_path, GOOD, "e,2,11.0,0,0,0,2,2", end="")
    assert len(read_live_steps(path)) == 1
