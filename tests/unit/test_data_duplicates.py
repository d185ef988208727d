"""Duplicates against brute force, and near duplicates against datasketch and exact similarity."""

import random
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH

from pretrain.data.clean import (
    BANDS,
    ROWS,
    SHINGLE_WORDS,
    Mode,
    Part,
    duplicate_keys,
    join_repeated,
    repeated_in_bucket,
    save_keys,
)

WORDS = [f"w{n}" for n in range(3000)]


def saved(directory: Path, tables: list[np.ndarray]) -> list[Part]:
    parts = []
    for number, table in enumerate(tables):
        path = directory / f"{number}"
        save_keys(path, list(table), "exact" if table.shape[1] == 1 else "near")
        parts.append(Part(path, 0, path.stat().st_size))
    return parts


def find_duplicates(paths: list[Part], mode: Mode, buckets: int = 1) -> list[np.ndarray]:
    found = (repeated_in_bucket(paths, mode, bucket, buckets) for bucket in range(buckets))
    return join_repeated(paths, mode, found)


@pytest.mark.parametrize("columns", [1, 1 + BANDS])
def test_later_documents_that_share_a_key_are_found(columns: int, tmp_path: Path) -> None:
    """Against every pair of documents; wherever the stream and the keys are cut."""
    mode: Mode = "exact" if columns == 1 else "near"
    random_keys = np.random.default_rng(columns)
    for case in range(6):
        span = int(random_keys.choice([3, 60, 2000]))
        keys = random_keys.integers(0, span, (120, columns), dtype=np.uint64)
        keys[::7] += np.uint64(2**64 - span)
        expected = [any((keys[j] == keys[i]).any() for j in range(i)) for i in range(len(keys))]
        for cuts in ([], [0], [50], [1, 1, 60, 119], [120]):
            directory = tmp_path / f"{case}-{len(cuts)}-{sum(cuts)}"
            directory.mkdir()
            tables = np.split(keys, cuts)
            paths = saved(directory, tables)
            for buckets in (1, 3, 64):
                found = find_duplicates(paths, mode, buckets)
                assert [len(f) for f in found] == [len(t) for t in tables]
                assert np.concatenate(found).tolist() == expected


def test_the_memory_of_a_bucket_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """At 1 and 10 times the documents, all of them duplicates, with 10 times the buckets."""
    table, peaks = np.random.default_rng(1).integers(0, 2**64, (5000, 1 + BANDS), np.uint64), []
    for tasks in (4, 40):
        (tmp_path / str(tasks)).mkdir()
        paths = saved(tmp_path / str(tasks), [table] * tasks)
        tracemalloc.start()
        repeated_in_bucket(paths, "near", 0, tasks // 4)
        peaks.append(tracemalloc.get_traced_memory()[1] / 20_000)
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] and max(peaks) < 1.05 * 300


def test_a_stream_may_have_more_tasks_than_a_process_may_open_files(tmp_path: Path) -> None:
    keys = np.arange(400, dtype=np.uint64).repeat(2)[:, None]
    paths = saved(tmp_path, np.split(keys, 800))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        found = np.concatenate(find_duplicates(paths, "exact", 5))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found.tolist() == [False, True] * 400


def test_exact_duplicates_are_equal_texts(tmp_path: Path) -> None:
    texts = ["a b", "a  b", "A b", "a b", "", "", "a b ", "\ud800", "\ud800"]
    keys = np.stack([duplicate_keys(t, "exact") for t in texts])
    [found] = find_duplicates(saved(tmp_path, [keys]), "exact")
    assert found.tolist() == [t in texts[:i] for i, t in enumerate(texts)]


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        ("one two three four five six", "One  TWO three:\nfour five six. ", True),
        ("“It’s one,” he said", "it's one, - he said.", True),
        ("=====", "-----", False),
        ("one two three", "three two one", False),  # too short for a sequence of five
        ("one two three", "one two", False),
        ("", " ", False),  # no words: only equal texts are duplicates
        ("", "", True),
        ("the cat sat on the mat " * 50, "the cat sat on the mat " * 90, True),
        ("a b c d e f g h", "h g f e d c b a", False),
    ],
)
def test_near_duplicates_share_words_in_order(one: str, other: str, near: bool) -> None:
    assert (duplicate_keys(one, "near") == duplicate_keys(other, "near")).any() == near


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    copy = list(words)
    for place in rng.sample(range(len(words)), edits):
        copy[place] = f"edit{rng.random()}"
    return copy


def sequences(words: list[str]) -> set[tuple[str, ...]]:
    return set(zip(*(words[i:] for i in range(SHINGLE_WORDS))))


def planted(pairs: int) -> list[tuple[list[str], list[str], float]]:
    """(a document, an edited copy, their exact Jaccard similarity), from 0.3 to 1."""
    rng = random.Random(3)
    result = []
    for number in range(pairs):
        words = rng.choices(WORDS, k=rng.randint(100, 400))
        copy = edited(rng, words, number % (len(words) // 8))
        a, b = sequences(words), sequences(copy)
        result.append((words, copy, len(a & b) / len(a | b)))
    return result


def test_near_duplicates_are_found_as_often_as_the_formula_and_datasketch_say() -> None:
    """Over 1,200 planted pairs; the number found is a sum of independent draws of known mean.

    datasketch is another MinHash (other hashes, other permutations) with the same bands, so its
    number is a second draw of the same sum.
    """
    pairs = planted(1200)
    found = [
        bool((duplicate_keys(" ".join(a), "near") == duplicate_keys(" ".join(b), "near")).any())
        for a, b, _ in pairs
    ]
    oracle = []
    for a, b, _ in pairs:
        lsh = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
        sketches = MinHash.bulk(
            [[" ".join(s).encode() for s in sequences(d)] for d in (a, b)], num_perm=BANDS * ROWS
        )
        lsh.insert("a", sketches[0])
        oracle.append(bool(lsh.query(sketches[1])))
    chance = np.array([1 - (1 - j**ROWS) ** BANDS for *_, j in pairs])
    similarity = np.array([j for *_, j in pairs])
    for low, high in ((0, 0.6), (0.6, 0.75), (0.75, 0.85), (0.85, 0.95), (0.95, 1.01), (0, 1.01)):
        here = (low <= similarity) & (similarity < high)
        assert here.sum() > 50
        mean, sigma = chance[here].sum(), (chance[here] * (1 - chance[here])).sum() ** 0.5
        assert abs(np.array(found)[here].sum() - mean) < 4 * sigma + 1
        assert abs(np.array(oracle)[here].sum() - mean) < 4 * sigma + 1
    assert all(f for f, j in zip(found, similarity) if j == 1)


def test_keys_are_the_same_on_every_machine() -> None:
    """Numbers from the day they were written: a build may go on with another rensa or numpy."""
    text = "It was the best of times, it was the worst of times, it was the age of wisdom"
    keys = duplicate_keys(text, "near")
    assert [hex(k) for k in keys[:3].tolist()] == [
        "0xc5af74231a524f82",
        "0x7cd41f4a3ee958ee",
        "0x4f6aebca5ce413d4",
    ]
    command = "from pretrain.data.clean import duplicate_keys as d; import sys; "
    command += "print(d(sys.argv[1], 'near').tolist())"
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", command, text],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed},
        )
        assert answer.stdout.strip() == str(keys.tolist())
