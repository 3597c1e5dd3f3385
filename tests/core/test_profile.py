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
        ({"kv__bytes_per_token": -3.0}, "kv_bytes_per_token"),
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


def test_a_failed_write_leaves_the_old_profile(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    save_profile(path, PROFILE)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError):
        save_profile(path, PROFILE)
    monkeypatch.undo()
    assert load_profile(path) == PROFILE
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
