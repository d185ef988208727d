"""Test `pretrain data build`: what becomes of every document, and what is refused.

The rooms that it calls (sources, cleaning, tokenizers, shards) have tests of their own. Here the
data set as a whole is compared with what the input files say.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError, parse_config
from pretrain.data import build as command
from pretrain.data import clean
from pretrain.data.build import build, show_plan
from pretrain.data.build.tasks import Sampler, read_sample
from pretrain.data.clean import document_hash
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import find_tokenizer, load_tokenizer

LETTERS = str.maketrans("0123456789", "aeioulnrst")
DOCUMENTS = [
    f"Document {i}: "
    + " ".join(str((i + 7) * k % 9973).translate(LETTERS) for k in range(150 + 37 * i))
    + "\nend\n"
    for i in range(12)
]


def config(root: Path, cleaning=None, **data):
    return parse_config(
        {
            "run": {"directory": str(root / "run")},
            "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
            "batch": {"micro_batch_size": 1, "global_batch_size": 1},
            "data": {
                "directory": str(root / "data"),
                "sequence_length": 16,
                "vocab_size": 310,
                "tokens_per_block": 1024,
                "tokens_per_shard": 3000,
                "validation_fraction": 0.1,
                # Some four documents a task.
                "bytes_per_task": 6_000,
            }
            | ({} if "corpora" in data else {"paths": [str(root / "*.txt")]})
            | data,
            "cleaning": cleaning or {},
            "optimizer": {"learning_rate": 1e-3},
            "train": {"num_steps": 1},
        },
        "test",
    )


def write_text(root: Path) -> Path:
    for i, text in enumerate(DOCUMENTS):
        (root / f"{i:02d}.txt").write_text(text)
    return root


def write_jsonl(path: Path, texts) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = write_text(tmp_path_factory.mktemp("built"))
    build(config(root))
    return root


def documents(directory: Path) -> list[str]:
    """Return the documents of a split as its tokens hold them."""
    stream, tokenizer = TokenStream(directory), load_tokenizer(find_tokenizer(directory.parent))
    tokens = stream.read(0, len(stream))
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends[:-1] + 1)]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def report(directory: Path):
    return json.loads((directory / "build.json").read_text())["report"]


def refused(message: str):
    return pytest.raises(ConfigError, match=message)


# ---- what is built -------------------------------------------------------------------------------
def test_every_document_is_in_one_split_in_the_order_of_the_files(built):
    train, validation = documents(built / "data/train"), documents(built / "data/validation")
    # A tenth of 12 documents is one, and which one its hash decides.
    assert validation == [min(DOCUMENTS, key=document_hash)]
    assert train == [text for text in DOCUMENTS if text not in validation]
    stream = TokenStream(built / "data/train")
    assert stream.manifest.documents == 11 and stream.manifest.text_bytes == sum(
        len(t.encode()) for t in train
    )
    assert stream.manifest.corpora[0].name == "text"


def test_stock_webdataset_reads_the_same_tokens(built):
    """Read the shards without this project's code, in a process with webdataset's secure mode."""
    shards = sorted(map(str, (built / "data/train").glob("*.tar")))
    program = """
import json, sys, numpy as np, webdataset
assert webdataset.utils.enforce_security
samples = list(webdataset.WebDataset(sys.argv[1:], shardshuffle=False).decode())
print(json.dumps({"keys": [s["__key__"] for s in samples], "dtype": str(samples[0]["npy"].dtype),
                  "tokens": np.concatenate([s["npy"] for s in samples]).tolist()}))
"""
    output = subprocess.run(
        [sys.executable, "-c", program, *shards],
        env=os.environ | {"WDS_SECURE": "1"},
        capture_output=True,
        text=True,
    )
    assert output.returncode == 0, output.stderr
    found = json.loads(output.stdout)
    tokenizer = load_tokenizer(built / "data/tokenizer.model")
    held_out = min(DOCUMENTS, key=document_hash)
    texts = [text for text in DOCUMENTS if text != held_out]
    expected = [[*tokenizer.encode(text).tolist(), tokenizer.eos_id] for text in texts]
    assert found["tokens"] == [token for each in expected for token in each]
    assert found["dtype"] == "uint16" and found["keys"] == sorted(found["keys"])
    assert found["keys"][0] == "000000-00000000"


def test_the_number_of_processes_changes_nothing(built, tmp_path):
    build(config(built, directory=str(tmp_path / "again")), workers=3)
    assert contents(tmp_path / "again") == contents(built / "data")


@pytest.mark.parametrize("deduplicate", ["none", "near"])
def test_no_document_vanishes_without_being_counted(tmp_path, deduplicate, monkeypatch):
    """What went in is what came out, and what the report says was left out and why."""
    numbers = random.Random(1)
    texts = [numbers.choice(DOCUMENTS) + f"{numbers.randrange(60)}" for _ in range(300)]
    # Copies, an empty one, one that cannot be read, and one that holds held-out text.
    texts += [texts[0], texts[0], "", DOCUMENTS[3]]
    write_jsonl(tmp_path / "a.jsonl", texts)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{damaged\n")
    settings = config(
        tmp_path,
        {"deduplicate": deduplicate, "max_skipped_documents": 1},
        source="jsonl",
        paths=[str(tmp_path / "a.jsonl")],
        bytes_per_task=20_000,
    )
    build(settings, workers=1)
    counts = report(tmp_path / "data")["corpora"]["text"]["counts"]
    kept = Counter(documents(tmp_path / "data/train"))
    validation = Counter(documents(tmp_path / "data/validation"))
    left = sum(counts.get(f"{r}.documents", 0) for r in ("held_out", "duplicates", "contaminated"))
    assert counts["skipped"] == 1 and counts["cleaning.min_document_characters.documents"] == 1
    assert counts["read.documents"] == len(texts)
    assert kept.total() + left == counts["text.documents"] == len(texts) - 1
    given = Counter(texts)
    assert kept <= given and not kept & validation
    # Every copy of a held-out text is held out, and the split has one of each.
    assert counts["held_out.documents"] == sum(given[text] for text in validation)
    assert set(validation.values()) == {1}
    if deduplicate != "none":
        assert set(kept.values()) == {1} and counts["duplicates.documents"] > 0
        # The same keys in many buckets.
        expected = contents(tmp_path / "data")
        shutil.rmtree(tmp_path / "data")
        monkeypatch.setattr(clean, "COMPARED_BYTES", 5000)
        stages = count_tokenize_stages(monkeypatch)
        build(settings, workers=1)
        assert contents(tmp_path / "data") == expected
        assert stages == ["scan", "compare", "tokenize"]


def test_held_out_text_is_not_in_training_exactly_or_nearly(tmp_path):
    """A held-out text stands again in another file, and once more with a few words changed."""
    held_out = min(DOCUMENTS, key=document_hash)
    write_text(tmp_path)
    (tmp_path / "97.txt").write_text(held_out)
    words = held_out.split(" ")
    # Its hash is another one, which must not be held out in place of the first.
    nearly = " ".join(["other", *words[1:]])
    assert document_hash(nearly) > document_hash(held_out)
    (tmp_path / "98.txt").write_text(nearly)
    (tmp_path / "99.txt").write_text("Before. " + held_out + " After.")
    build(config(tmp_path))
    assert documents(tmp_path / "data/validation") == [held_out]
    assert documents(tmp_path / "data/train") == [t for t in DOCUMENTS if t != held_out]
    counts = report(tmp_path / "data")["corpora"]["text"]["counts"]
    assert counts["held_out.documents"] == 2 and counts["contaminated.documents"] == 2
    assert report(tmp_path / "data")["leakage"]["after"] == 0


def test_a_single_document_is_cut_in_two(tmp_path):
    (tmp_path / "only.txt").write_text(DOCUMENTS[-1])
    (tmp_path / "same.txt").write_text(DOCUMENTS[-1])
    build(config(tmp_path))
    cut = len(DOCUMENTS[-1]) - round(len(DOCUMENTS[-1]) * 0.1)
    assert documents(tmp_path / "data/train") == [DOCUMENTS[-1][:cut]]
    assert documents(tmp_path / "data/validation") == [DOCUMENTS[-1][cut:]]
    assert report(tmp_path / "data")["leakage"]["after"] == 0


def test_the_rest_of_a_document_that_repeats_is_found_in_its_beginning(tmp_path):
    (tmp_path / "only.txt").write_text((DOCUMENTS[-1] + "\n") * 20)
    build(config(tmp_path))
    assert report(tmp_path / "data")["leakage"]["after"] > 0


def test_two_corpora_of_one_document_each_are_not_cut(tmp_path):
    corpora = {}
    for i, text in enumerate(DOCUMENTS[:2]):
        (tmp_path / f"{i}.txt").write_text(text)
        corpora[f"c{i}"] = {"paths": [str(tmp_path / f"{i}.txt")]}
    with refused("no corpus has two different documents.*set data.validation_paths"):
        build(config(tmp_path, corpora=corpora))


# ---- up to date ----------------------------------------------------------------------------------
def test_a_new_time_or_name_of_the_same_text_is_the_same_input(
    built, tmp_path, capsys, monkeypatch
):
    write_text(tmp_path)
    build(config(tmp_path))
    os.utime(tmp_path / "03.txt", ns=(1, 1))
    build(config(tmp_path))
    monkeypatch.chdir(tmp_path)
    build(config(tmp_path, paths=["*.txt"]))
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("*.txt"):
        path.rename(tmp_path / "moved" / path.name)
    build(config(tmp_path, paths=["moved/*.txt"]))
    assert capsys.readouterr().out.count("nothing to do") == 3


def test_other_text_is_refused(tmp_path):
    build(config(write_text(tmp_path)))
    for change, message in (
        (lambda p: p.write_text("something else"), r"03\.txt has 14 bytes, where .* had \d+"),
        (lambda p: p.write_text(DOCUMENTS[3][::-1]), r"03\.txt has other content"),
        (lambda p: p.unlink(), r"was 12 files, is 11 \(for one .*03\.txt\)"),
    ):
        change(tmp_path / "03.txt")
        with refused(rf"the text \(files and their content\).*{message}"):
            build(config(tmp_path))


def test_other_settings_are_refused_and_nothing_is_lost(built):
    before = contents(built / "data")
    with refused(
        r"data\.directory = .*data\.tokens_per_block was 1024, is 2048\. "
        r"Nothing was changed\. Choose another"
    ):
        build(config(built, tokens_per_block=2048))
    with refused(r"data\.vocab_size was 310, is 320"):
        build(config(built, vocab_size=320))
    with refused(r"cleaning\.deduplicate was 'none', is 'exact'"):
        build(config(built, {"deduplicate": "exact"}))
    assert contents(built / "data") == before


@pytest.mark.parametrize(
    "record", ["{", '{"inputs": 3}', '{"inputs": {"settings": {}, "files": {"train": [[1]]}}}']
)
def test_a_directory_of_something_else_is_left_alone(tmp_path, record):
    write_text(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/build.json").write_text(record)
    before = contents(tmp_path / "data")
    with refused(r"data\.directory = .*(holds no finished data set)"):
        build(config(tmp_path))
    assert contents(tmp_path / "data") == before


def link_to_nothing(root: Path) -> Path:
    (root / "link").symlink_to(root / "disk/data")
    return root / "link"


def beside_a_link(root: Path) -> Path:
    (root / "disk/other").mkdir(parents=True)
    (root / "link").symlink_to(root / "disk/other")
    return root / "link/../data"


@pytest.mark.parametrize("name", [link_to_nothing, beside_a_link])
def test_a_data_set_lies_where_its_name_leads(built, tmp_path, name):
    """It is read by the name that it was built by, and built on the disk on which it lies."""
    given = name(tmp_path)
    build(config(built, directory=str(given)))
    assert contents(given) == contents(built / "data") == contents(tmp_path / "disk/data")
    assert not list(tmp_path.glob(".building*"))


def test_a_mounted_disk_is_refused_before_the_build(tmp_path, monkeypatch):
    write_text(tmp_path)
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    with refused(r"data\.directory = .*disk: a disk is mounted there.*directory=.*/disk/data"):
        build(config(tmp_path, directory=str(tmp_path / "disk")))
    assert not list(tmp_path.glob(".building*"))


# ---- refused early -------------------------------------------------------------------------------
def count_tokenize_stages(monkeypatch) -> list[str]:
    """Return a list that gets the name of every stage that begins."""
    stages: list[str] = []
    real = command.run_locally

    def run(folder, stage, *args, **options):
        stages.append(stage)
        real(folder, stage, *args, **options)

    monkeypatch.setattr(command, "run_locally", run)
    return stages


def test_validation_files_without_text_are_refused_before_anything_is_tokenized(
    tmp_path, monkeypatch
):
    write_text(tmp_path)
    (tmp_path / "empty.held").write_text("\ufeff")
    stages = count_tokenize_stages(monkeypatch)
    with refused(r"data\.validation_paths = .*no text for the validation split"):
        build(config(tmp_path, validation_paths=[str(tmp_path / "*.held")]))
    assert not (tmp_path / "data").exists() and stages == ["scan"]


def test_an_own_tokenizer_is_used(built, tmp_path, monkeypatch):
    write_text(tmp_path)
    own = str(built / "data/tokenizer.model")
    stages = count_tokenize_stages(monkeypatch)
    with refused(
        r"data\.vocab_size = 400: the model in data\.tokenizer = .* has 310 pieces\. "
        r"Set data\.vocab_size=310"
    ):
        build(config(tmp_path, tokenizer=own, vocab_size=400))
    assert not stages
    build(config(tmp_path, tokenizer=own))
    assert (tmp_path / "data/tokenizer.model").read_bytes() == Path(own).read_bytes()
    for split in ("train", "validation"):
        assert contents(tmp_path / "data" / split) == contents(built / "data" / split)


def test_text_that_is_all_left_out_is_refused(tmp_path):
    """Both documents hold the same words, and one of them is held out."""
    (tmp_path / "a.txt").write_text(DOCUMENTS[0])
    (tmp_path / "b.txt").write_text(DOCUMENTS[0] + " ")
    with refused(r"cleaning: every document of the train split was left out"):
        build(config(tmp_path, validation_fraction=0.5))


def test_too_many_unreadable_documents_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "KEPT_BYTES", 0)
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n" * 3)
    given = {"source": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
    with refused(r"a\.jsonl:\d+: "):
        build(config(tmp_path, **given))
    # The build that it ended goes on with a higher limit.
    with refused(r"more than cleaning\.max_skipped_documents = 2 .*a\.jsonl:\d+: "):
        build(config(tmp_path, {"max_skipped_documents": 2}, **given))
    build(config(tmp_path, {"max_skipped_documents": 3}, **given))
    build(config(tmp_path, {"max_skipped_documents": 3}, directory=str(tmp_path / "d3"), **given))
    assert TokenStream(tmp_path / "d3/train").manifest.documents == 11
    assert contents(tmp_path / "data") == contents(tmp_path / "d3")


# ---- the tokenizer's sample ----------------------------------------------------------------------


def test_a_large_corpus_is_sampled_evenly_and_within_the_bound(tmp_path):
    """A tenth of 20,000 lines is taken, and about as much of each part of the stream."""
    texts = [f"line {i:05d} " + "x" * 100 for i in range(20_000)]
    total = sum(map(len, texts))
    for kept in (total // 10, total // 5):
        sampler = Sampler(3, kept)
        for i, text in enumerate(texts):
            sampler.add(i, text)
        sampler.save(tmp_path / f"{kept}")
    found = [list(read_sample(p.open(), total // 10, set())) for p in sorted(tmp_path.iterdir())]
    # What is taken does not depend on how much more was kept.
    assert found[0] == found[1]
    taken = [int(line.split()[1]) for line in found[0]]
    assert taken == sorted(set(taken)) and 0.99 * 2000 < len(taken) <= 2000
    parts = np.bincount(np.array(taken) // 2000, minlength=10)
    # Each is binomial with mean 200 and deviation 13.4; five deviations.
    assert abs(parts - 200).max() < 67, parts


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package, cleaning, name",
    [
        ("rensa", {"deduplicate": "near"}, "a.txt"),
        ("ftfy", {"repair_unicode": True}, "a.txt"),
        ("zstandard", {}, "a.txt.zst"),
        ("pyarrow", {}, "a.parquet"),
    ],
)
def test_a_missing_package_is_refused_before_the_build(
    tmp_path, monkeypatch, package, cleaning, name
):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    stages = count_tokenize_stages(monkeypatch)
    run = config(tmp_path, cleaning, paths=[str(tmp_path / name)])
    for act in (build, show_plan):
        with refused(rf"the package {package} is missing. Run `pip install -e '.\[data\]'`"):
            act(run)
    assert stages == [] and not (tmp_path / "data").exists()


def test_boilerplate_in_a_held_out_document_costs_training_nothing(built, tmp_path):
    """Half of the documents have a licence that is longer than they are; some were held out."""
    rng = np.random.default_rng(3)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 6)) for _ in range(2000)]
    licence = " ".join(rng.choice(words, 120))
    pages = [" ".join(rng.choice(words, 60)) for _ in range(80)]
    pages = [f"{licence} {page}" if n % 2 else page for n, page in enumerate(pages)]
    write_jsonl(tmp_path / "pages.jsonl", pages)
    run = config(
        tmp_path,
        source="jsonl",
        paths=[str(tmp_path / "pages.jsonl")],
        tokenizer=str(built / "data/tokenizer.model"),
    )
    build(run)
    found = report(tmp_path / "data")
    lowest = sorted(pages, key=document_hash)[:8]
    assert any(licence in page for page in lowest)
    assert found["corpora"]["text"]["counts"].get("contaminated.documents", 0) == 0
    assert documents(tmp_path / "data/validation") == [
        p for p in pages if p in lowest and licence not in p
    ]
    assert found["train"]["documents"] == 80 - found["validation"]["documents"]
