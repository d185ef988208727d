"""Test the built data set.

Shards hold the tokens of the text, unmodified webdataset reads them, and damage is reported before
training.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.data.build import build
from pretrain.data.clean import document_hash
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import load_tokenizer
from tests.unit.test_data_build import DOCUMENTS, write_text
from tests.unit.test_data_build import config as build_config

# A tenth of 12 documents is one, and which one its hash decides.
HELD_OUT = [min(DOCUMENTS, key=document_hash)]
TRAINING = [text for text in DOCUMENTS if text not in HELD_OUT]

MISSING = r"missing, but the manifest of .*train refers to it\. Restore it"


def config(root: Path, **data):
    """Return the config of the tests of build, with all documents in one task."""
    return build_config(root, **{"bytes_per_task": 256_000_000} | data)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = write_text(tmp_path_factory.mktemp("built"))
    build(config(root))
    return root


@pytest.fixture
def root(built, tmp_path):
    """Return the directory of a copy of the built data set, which the test may damage."""
    shutil.copytree(built / "data", tmp_path / "data")
    return tmp_path


def expected_tokens(directory: Path, documents) -> np.ndarray:
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    return np.concatenate([[*tokenizer.encode(text), tokenizer.eos_id] for text in documents])


def refused(message: str):
    return pytest.raises(ConfigError, match=message)


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
    found, expected = json.loads(output.stdout), expected_tokens(built / "data", TRAINING)
    assert found["tokens"] == expected.tolist()
    assert found["dtype"] == "uint16"
    assert found["keys"] == [f"000000-{block:08d}" for block in range(-(-len(expected) // 1024))]


@pytest.mark.parametrize(
    "name, message",
    [
        ("text-000002.tar", rf"text-000002\.tar: {MISSING}"),
        ("checksums.bin", rf"checksums\.bin: {MISSING}"),
        ("../tokenizer.model", rf"tokenizer\.model: {MISSING}"),
        (
            "manifest.json",
            r"manifest\.json: no such file, so there is no finished data set "
            r".*`pretrain data build CONFIG`",
        ),
    ],
)
def test_a_missing_file_is_named(root, name, message):
    (root / "data/train" / name).unlink()
    with refused(message):
        TokenStream(root / "data/train")


def test_a_manifest_of_another_version_is_refused(root):
    path = root / "data/train/manifest.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 1'))
    # Not "remove it": its runs' checkpoints may have no other copy of their tokenizer.
    with refused(
        r"format_version = 1, but this version of pretrain reads format 2\. Build a data set in "
        r"another data\.directory; .* data\.tokenizer = .*/data/tokenizer\.model"
    ):
        TokenStream(root / "data/train")
