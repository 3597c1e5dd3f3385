# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny Llama with its tokenizer, offline: random weights, real shapes.

It says nothing sensible, but it says it at the speed and with the KV cache of
a real model of its size, which is what a scheduler is measured by.

    python examples/make_tiny_model.py --output tiny-llama
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

SEED = 20260
VOCABULARY = 2048
#: Written last. Its text names the recipe, so that a folder made by another
#: version of this file, or cut off half-way, is made again.
STAMP = "kairos-tiny-model.json"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

SPECIAL = ("<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def recipe() -> str:
    """Names what `make` makes: a digest of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether a folder holds the model that this file makes."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        return stamp["recipe"] == recipe() and all(
            (folder / name).stat().st_size == size
            for name, size in stamp["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def training_text(lines: int = 4000) -> list[str]:
    """Made-up text: words of syllables, the same at every run."""
    dice = random.Random(SEED)
    syllables = [c + v for c in "bdfghklmnprstvwz" for v in ("a", "e", "i", "o", "u")]
    words = [
        "".join(dice.choices(syllables, k=dice.randint(1, 4))) for _ in range(1200)
    ]
    return [
        " ".join(dice.choices(words, k=dice.randint(4, 16))).capitalize() + "."
        for _ in range(lines)
    ]


def make(folder: Path) -> bool:
    """Make the model unless it is there.

    Args:
        folder: Where to; replaced whole if it holds an older or a cut-off
            model.

    Returns:
        Whether it was made now.

    Raises:
        FileExistsError: The folder holds something else.
    """
    if is_whole(folder):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        raise FileExistsError(f"{folder}: not empty, and no tiny model of ours")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _write_tokenizer(new)
        _write_weights(new)
        files = {path.name: path.stat().st_size for path in new.iterdir()}
        stamp = {"recipe": recipe(), "files": files}
        (new / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        new.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return True


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _write_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        rope_theta=500000.0,
        # Untied and wide, so that what comes next depends on the whole prompt:
        # lost or misplaced KV shows in the tokens.
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=SPECIAL.index("<|bos|>"),
        eos_token_id=SPECIAL.index("<|eos|>"),
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder, safe_serialization=True)


def main() -> int:
    """Make the model and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    try:
        made = make(args.output)
    except OSError as error:
        print(f"make_tiny_model.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
