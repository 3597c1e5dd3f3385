# SPDX-License-Identifier: Apache-2.0
"""Documents of the tasks: made here from a seed, so nothing is fetched.

Recall documents are long, and what is asked for stands at one place of them:
a KV block that is lost, foreign or misplaced takes the answer with it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

SEED = 20261

_PLACES = [
    "harbour",
    "library",
    "station",
    "market",
    "garden",
    "museum",
    "bakery",
    "theatre",
    "workshop",
    "chapel",
    "orchard",
    "lighthouse",
    "quarry",
    "stable",
    "brewery",
    "school",
    "tower",
    "bridge",
    "mill",
    "castle",
    "hospital",
    "vineyard",
    "foundry",
    "dairy",
]
_NAMES = [
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "James",
    "Karin",
    "Louis",
    "Maria",
    "Nolan",
    "Olive",
    "Peter",
    "Quinn",
    "Rosa",
    "Simon",
    "Teresa",
    "Umar",
    "Vera",
    "Walter",
    "Yara",
]
_FILLER = (
    "The road to the {place} was repaired in the spring, and {name} walked along it "
    "every morning.",
    "{name} said that the {place} had been busy since the rain stopped.",
    "Nobody in the village remembered who had built the {place}, not even {name}.",
    "In the evening {name} closed the windows of the {place} and went home.",
    "A letter for {name} arrived at the {place} two days late.",
    "The old {place} smelled of wood and paint, which {name} liked.",
)
#: Prompt tokens of the documents of the recall tasks, roughly.
RECALL_TOKENS = (300, 600, 1000, 1600)
CHAT_TOKENS = (500, 1100)
CHOICE_TOKENS = 250
_TOKENS_OF_A_SENTENCE = 17


def _document(dice: random.Random, tokens: int) -> dict[str, str]:
    """Filler with a code for every place; one of them is asked for."""
    places = dice.sample(_PLACES, k=min(4 + tokens // 400, 9))
    codes = {place: str(dice.randint(1000, 9999)) for place in places}
    sentences = [
        dice.choice(_FILLER).format(
            place=dice.choice(_PLACES), name=dice.choice(_NAMES)
        )
        for _ in range(tokens // _TOKENS_OF_A_SENTENCE)
    ]
    for place, code in codes.items():
        at = dice.randint(0, len(sentences))
        sentences.insert(at, f"The secret code of the {place} is {code}.")
    asked, *others = dice.sample(places, k=3)
    # Two answered questions show a small model the form.
    shown = "".join(
        f"Question: What is the secret code of the {place}?\n"
        f"Answer: The secret code of the {place} is {codes[place]}.\n\n"
        for place in others
    )
    return {
        "text": " ".join(sentences) + "\n\n" + shown,
        "question": f"What is the secret code of the {asked}?",
        "lead": f"The secret code of the {asked} is",
        "code": codes[asked],
        "other": codes[others[0]],
    }


def recall(**_: Any) -> dict[str, datasets.Dataset]:
    """One document of each length of `RECALL_TOKENS`."""
    return _documents(SEED, RECALL_TOKENS)


def recall_chat(**_: Any) -> dict[str, datasets.Dataset]:
    """One document of each length of `CHAT_TOKENS`."""
    return _documents(SEED + 1, CHAT_TOKENS)


def _documents(seed: int, lengths: tuple[int, ...]) -> dict[str, datasets.Dataset]:
    dice = random.Random(seed)
    rows = [_document(dice, tokens) for tokens in lengths]
    return {"test": datasets.Dataset.from_list(rows)}


def _lines(name: str) -> Iterator[dict[str, Any]]:
    with (Path(__file__).parent / name).open() as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _told(dice: random.Random) -> dict[str, Any]:
    """A question that a text before it answers."""
    document = _document(dice, CHOICE_TOKENS)
    codes = [document["code"], document["other"], str(dice.randint(1000, 9999))]
    order = dice.sample(range(3), k=3)
    return {
        "text": document["text"],
        "question": document["question"],
        "choices": [f"{document['lead']} {codes[i]}." for i in order],
        "answer": order.index(0),
    }


def choice(**_: Any) -> dict[str, datasets.Dataset]:
    """Questions on a text, longer than a chunk, and on what anyone knows."""
    dice = random.Random(SEED + 2)
    rows = [_told(dice) for _ in range(2)]
    rows += [{"text": "", **row} for row in _lines("choice.jsonl")]
    return {"test": datasets.Dataset.from_list(rows)}


def continuation(**_: Any) -> dict[str, datasets.Dataset]:
    """Beginnings with one right continuation."""
    return {"test": datasets.Dataset.from_list(list(_lines("continuation.jsonl")))}


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether a generation holds the word looked for."""
    return {"contains": float(doc["word"].lower() in results[0].lower())}
