"""The choice of held-out documents, against the same rule in one process that sees all."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import xxhash

from pretrain.data.clean import Candidates, choose_held_out
from tests.conftest import mark_torture


def naive(texts: list[str], fraction: float, max_bytes: int) -> list[str]:
    """The rule as it is stated, over a list of all documents."""

    def place(text: str) -> tuple[bool, int]:
        return len(text.encode()) > max_bytes, xxhash.xxh3_64_intdigest(text.encode())

    order = sorted(set(texts), key=place)
    chosen: list[str] = []
    for text in order[:-1]:
        many = len(chosen) >= max(1, int(fraction * len(texts)))
        large = len("".join([*chosen, text]).encode()) > max_bytes
        if chosen and (many or large):
            break
        chosen.append(text)
    return chosen


def ours(directory: Path, tasks: Iterable[list[str]], fraction: float, max_bytes: int) -> list[str]:
    paths = []
    for number, texts in enumerate(tasks):
        candidates = Candidates(max_bytes)
        for text in texts:
            assert candidates.add(text) == xxhash.xxh3_64_intdigest(text.encode())
        paths.append(directory / f"{number}")
        candidates.save(paths[-1])
    return [*choose_held_out(map(Path.open, paths), fraction).values()]


def split(rng: random.Random, texts: list[str]) -> list[list[str]]:
    """Deal documents to up to 7 tasks, some of which may have none."""
    tasks: list[list[str]] = [[] for _ in range(rng.randint(1, 7))]
    for text in texts:
        rng.choice(tasks).append(text)
    return tasks


SEEDS = [(seed,) for seed in range(1000)]


@pytest.mark.parametrize(["seed"], mark_torture(SEEDS, {*SEEDS[:20]}))
def test_the_choice_is_that_of_one_process_that_sees_all(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = rng.choice([(1, 10), (1, 400), (50, 60), (200, 5000), (0, 3)])
    texts = ["é" * rng.randint(*sizes) + str(rng.randint(0, 60)) for _ in range(rng.randint(0, 80))]
    fraction, max_bytes = rng.choice([0.01, 0.1, 0.5, 0.99]), rng.choice([1, 60, 300, 3000, 10**6])
    expected = naive(texts, fraction, max_bytes)
    for number in range(2):
        rng.shuffle(texts)
        directory = tmp_path / str(number)
        directory.mkdir()
        assert ours(directory, split(rng, texts), fraction, max_bytes) == expected


def test_a_file_of_candidates_holds_no_more_text_than_may_be_held_out(tmp_path: Path) -> None:
    candidates = Candidates(1000)
    for number in range(5000):
        candidates.add(f"{number:0100}")
    candidates.save(tmp_path / "task")
    _, *kept = (tmp_path / "task").read_text().splitlines()
    assert sum(len(json.loads(line)[1]) for line in kept) == 1000
    for number in range(300):
        candidates.add("x" * (5000 + number))
    candidates.save(tmp_path / "task")
    assert (tmp_path / "task").read_text().splitlines()[1:] == kept
