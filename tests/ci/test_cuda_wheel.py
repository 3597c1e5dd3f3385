# SPDX-License-Identifier: Apache-2.0
"""The patch set on the wheel for CUDA, whose files are fetched once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

import vllm_release

from tests.test_env import contents, copy_touched, states
from vllm_kairos import patching
from vllm_kairos.files import UserError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The Python files of vLLM's own wheel."""
    try:
        return vllm_release.wheel_python("vllm", patching.VLLM_VERSION)
    except UserError as error:
        pytest.skip(f"the wheel for CUDA cannot be fetched: {error}")


def test_the_wheel_for_cuda_takes_all_but_the_example_and_gives_it_back(
    wheel: Path, tmp_path: Path
) -> None:
    copy_touched(wheel, tmp_path)
    before = contents(tmp_path)
    patching.apply(tmp_path)
    found = list(states(tmp_path).values())
    assert found[:2] == ["applied", "applied"]
    assert set(found[2:]) <= {"skipped"}
    assert contents(tmp_path) != before
    patching.revert(tmp_path)
    assert contents(tmp_path) == before


def test_the_wheels_differ_in_nothing_that_is_patched(
    wheel: Path, vllm_sdist: Path
) -> None:
    compared = 0
    for patch in patching.load_patches(patching.patch_directory()):
        for path in patch.diffs:
            if path.startswith("vllm/"):
                assert (wheel / path).read_bytes() == (vllm_sdist / path).read_bytes()
                compared += 1
    assert compared >= 3
