# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler tests give the same verdicts with Kairos in place.

They are taken from vLLM's source distribution, run twice from a folder that
holds ``facebook/opt-125m`` as a configuration without weights, and compared
test by test. Tests that need other models fail offline with either class.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(900)]

TESTS = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_priority_scheduler_random.py",
    "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
)

OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def write_opt_125m(folder: Path) -> None:
    """A configuration and a tokenizer, whichever; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(OPT_125M))
    tokenizer = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def start(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={name}.xml", "-o", "junit_family=xunit1", *words, *TESTS]
    log = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": f"{root}:{folder}",
        },
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def verdicts(report: Path) -> dict[str, str]:
    """Verdict by test name."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag not in ("system-out",)]
        found[f"{case.get('file')}::{case.get('name')}"] = (
            kinds[0] if kinds else "passed"
        )
    return found


def test_upstream_verdicts_are_the_same_with_kairos_in_place(
    vllm_sdist: Path, tmp_path: Path
) -> None:
    (tmp_path / "tests").symlink_to(vllm_sdist / "tests")
    write_opt_125m(tmp_path / "facebook" / "opt-125m")
    plugin = Path(__file__).parent / "kairos_in_place.py"
    (tmp_path / "kairos_in_place.py").write_text(plugin.read_text())
    runs = [
        start(tmp_path, "stock"),
        start(tmp_path, "kairos", "-p", "kairos_in_place"),
    ]
    try:
        for run in runs:
            run.wait(timeout=800)
    finally:
        for run in runs:
            if run.poll() is None:
                run.kill()
    stock = verdicts(tmp_path / "stock.xml")
    kairos = verdicts(tmp_path / "kairos.xml")
    passed = sum(verdict == "passed" for verdict in stock.values())
    assert passed >= 83, (tmp_path / "stock.log").read_text()[-2000:]
    assert {t: v for t, v in kairos.items() if stock.get(t) != v} == {}
    assert stock.keys() == kairos.keys()
