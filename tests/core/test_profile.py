# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from vllm_kairos.core.profile import (
    EngineLimits,
    FittedPredictor,
    KvLink,
    Profile,
    decode_profile,
    encode_profile,
)
from vllm_kairos.files import UserError, load_profile, save_profile

PROFILE = Profile(
    name="tiny",
    model="m",
    hardware="h",
    engine_version="0.18.1",
    kind="measured",
    created="2026-01-31",
    prefill=FittedPredictor({"1": 5.0, "c": 0.02}),
    decode=FittedPredictor({"1": 8.0, "B": 0.1}, ranges={"B": (1.0, 8.0)}),
    mixed=FittedPredictor({"c": 0.03}, combine="max"),
    kv=KvLink(2048.0, 3e9, 1.5),
    engine=EngineLimits(2048, 64, 100_000),
)


def test_a_profile_survives_a_file(tmp_path):
    path = tmp_path / "p.json"
    save_profile(path, PROFILE)
    assert load_profile(path) == PROFILE
    model = load_profile(path).step_model()
    assert model.combine == "max"
    assert model.estimate(9, 0).outside == ("B",)


def _changed(**changes: object) -> bytes:
    raw = json.loads(encode_profile(PROFILE))
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        target = raw
        for part in path:
            target = target[part]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, "model"),
        ({"decode": None}, "decode"),
        ({"decode__terms": None}, "terms"),
        ({"surprise": 1}, "surprise"),
        ({"mixed__surprise": 1}, r"\$\.mixed"),
        ({"hardware": 7}, r"\$\.hardware"),
        ({"decode__terms": {"1": "fast"}}, r"\$\.decode\.terms"),
        ({"decode__terms": {"B": -0.5}}, "decode.terms.*'B'"),
        ({"decode__terms": {"Q": 0.5}}, "decode.terms.*'Q'"),
        ({"mixed__combine": "min"}, r"\$\.mixed\.combine"),
        ({"decode__terms": {}}, "decode.terms has no term above 0"),
        ({"prefill__terms": {"1": 0.0}}, "prefill.terms has no term above 0"),
        ({"mixed": {"terms": {}}}, "mixed.terms has no term above 0"),
        ({"decode__terms": {"1": 8.0, "c": 0.1}}, "decode.terms has 'c', expected"),
        ({"decode__ranges": {"B": [8.0, 1.0]}}, "decode.ranges.B is 8 to 1"),
        ({"mixed__ranges": {"c": [-1.0, 1.0]}}, "mixed.ranges.c is -1 to 1"),
        ({"mixed__ranges": {"x": [0.0, 1.0]}}, "mixed.ranges has 'x'"),
        ({"decode__steps": -5}, r">= 0.*\$\.decode\.steps"),
        ({"engine__budget_tokens": 0}, r">= 1.*\$\.engine\.budget_tokens"),
        ({"engine__max_num_seqs": -1}, r">= 1.*\$\.engine\.max_num_seqs"),
        ({"engine__kv_tokens": 0}, r">= 1.*\$\.engine\.kv_tokens"),
        ({"engine__block_size": 0}, r">= 1.*\$\.engine\.block_size"),
        ({"kv": {"bytes_per_token": 0.0}}, r"> 0.*\$\.kv\.bytes_per_token"),
        ({"kv__bytes_per_token": -3.0}, r"> 0.*\$\.kv\.bytes_per_token"),
        ({"kv__bytes_per_s": 0.0}, r"\$\.kv\.bytes_per_s"),
        ({"kv__fixed_ms": -1.0}, r">= 0.*\$\.kv\.fixed_ms"),
        ({"v": None}, "missing required field `v`"),
        ({"format": None}, "missing required field `format`"),
        ({"engine__max_num_seqs": 1.5}, r"\$\.engine\.max_num_seqs"),
        ({"kind": "guessed"}, r"\$\.kind"),
        ({"v": 2}, "version is 2, expected 1"),
        ({"format": "x"}, "format is 'x'"),
    ],
)
def test_a_field_missing_extra_or_wrong_is_named(tmp_path, changes, named):
    path = tmp_path / "p.json"
    path.write_bytes(_changed(**changes))
    with pytest.raises(UserError, match=named) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"v": NaN}', b"\xff\xfe"])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ValueError):
        decode_profile(text)


def test_a_profile_nested_without_end_is_refused():
    deep = b'{"x":' * 100_000 + b"1" + b"}" * 100_000
    data = encode_profile(PROFILE).replace(
        b'"provenance": {}', b'"provenance": ' + deep
    )
    assert len(data) > 500_000
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_profile(data)


def test_a_failed_write_leaves_the_old_profile(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    save_profile(path, PROFILE)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError):
        save_profile(path, PROFILE)
    monkeypatch.undo()
    assert load_profile(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
