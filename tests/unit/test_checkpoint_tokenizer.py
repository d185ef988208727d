"""Test that the tokenizer travels in a checkpoint, and that damage to it is named."""

from pathlib import Path

import pytest

from pretrain.checkpoint.save import tokenizer_of
from pretrain.checkpoint.tools import verify_checkpoint
from pretrain.config import ConfigError
from pretrain.data.tokenizer import load_tokenizer, train_tokenizer
from tests.unit.saved import first_origin, save
from tests.unit.test_tokenizer_json import gpt2


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / request.param
    if request.param == "tokenizer.json":
        gpt2().save(str(path))
    else:
        path.write_bytes(train_tokenizer([f"{i} foxes jump" for i in range(900)], 290))
    return load_tokenizer(path)


@pytest.fixture
def saved(tokenizer, tmp_path):
    data = {"tokenizer": tokenizer.fingerprint}
    return save(tmp_path / "run", 4, first_origin(data=data), tokenizer=tokenizer)


def test_a_checkpoint_has_it(tokenizer, saved):
    found = tokenizer_of(saved, Path("/none"))
    assert found.fingerprint == tokenizer.fingerprint in saved.manifest.digests.values()
    assert found.encode("12 foxes").tolist() == tokenizer.encode("12 foxes").tolist()
    problems, read = verify_checkpoint(saved.path)
    assert not problems and read == sum(saved.files.values())


def test_an_imported_models_checkpoint_takes_the_data_sets(tokenizer, tmp_path, capsys):
    """Without a tokenizer it loads, and the data set's is used if it is the one it recorded."""
    bare = save(tmp_path / "run", 4, first_origin(data={"tokenizer": tokenizer.fingerprint}))
    assert bare.tokenizer_file is None
    assert tokenizer_of(bare, tokenizer.path.parent).fingerprint == tokenizer.fingerprint
    said = f"{bare.path}: carries no tokenizer, so {tokenizer.path} is used\n"
    assert capsys.readouterr().err == said
    other = save(tmp_path / "other", 4, first_origin(data={"tokenizer": "0" * 64}))
    with pytest.raises(ConfigError, match=f"{tokenizer.path.name}: its SHA-256 is"):
        tokenizer_of(other, tokenizer.path.parent)
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        tokenizer_of(bare, tmp_path)
