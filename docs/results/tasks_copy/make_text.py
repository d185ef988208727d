"""Write the text of run.toml, in which most of what is not noise can be copied from a distance.

    python docs/results/tasks_copy/make_text.py runs/tasks_copy/text

Three documents in five repeat a sequence of words, all different, mostly of 2 to 8 words and else
of up to 32; two repeat sentences that say a number of 7 digits. In between stands what says
nothing: "lala", with one word in twenty. The validation text, in which the tasks plant what they
ask for, is of that alone.
"""

import json
import sys
from pathlib import Path

import numpy as np

WORDS = [a + b + c + "o" for a in "bdgkmprt" for b in "aeiu" for c in "ns"][:40]
DOCUMENTS, HELD_OUT = 26_000, 200
random = np.random.default_rng(1)


def sequence(words: int) -> str:
    """Return so many different words, in random order."""
    return "".join(f" {WORDS[i]}" for i in random.permutation(len(WORDS))[:words])


def nothing(words: int) -> str:
    """Return so many words that say nothing."""
    chosen = (
        WORDS[random.integers(len(WORDS))] if random.random() < 0.05 else "lala"
        for _ in range(words)
    )
    return "".join(f" {word}" for word in chosen)


def gap() -> int:
    """Draw a number of words between two copies: small ones are as likely as large ones."""
    return int(64 ** random.random()) - 1


def repeated_sequence() -> str:
    """Return a sequence over and over, with gaps."""
    length = int(2 * 4 ** random.random()) if random.random() < 0.6 else int(random.integers(8, 33))
    part, text, written = sequence(length), "", 0
    while written < 64 + length:
        words = gap() if random.random() < length / 100 else 0
        text += part + nothing(words)
        written += length + words
    return text


def repeated_number() -> str:
    """Return the numbers of one or two words four times, with gaps."""
    keys = random.permutation(len(WORDS))[: 1 + (random.random() < 0.3)]
    parts = [
        f" The magic number of {WORDS[key]} is {random.integers(1_000_000, 10_000_000)}."
        for key in keys
    ]
    order = (i for _ in range(4) for i in random.permutation(len(parts)))
    return "".join(nothing(gap() // 4) + parts[i] for i in order)


def main(folder: Path) -> None:
    """Write train.jsonl and validation.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    makers = [repeated_number] * 2 + [repeated_sequence] * 3
    training = (makers[i % 5]() for i in range(DOCUMENTS))
    held_out = (nothing(100) for _ in range(HELD_OUT))
    for name, documents in (("train", training), ("validation", held_out)):
        with open(folder / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
