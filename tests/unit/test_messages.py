"""The one table of messages: how each is provoked, and what it must name.

A message names the file, the key, the value and the remedy, as far as there are such. A row says
the words without which it would not, and nothing of the sentence around them. The rest of the tests
says that something is refused, not how.
"""

from __future__ import annotations

import errno
import os

import pytest

from pretrain.config import ConfigError, NoSpace, RunFailed, load_config, writing
from pretrain.config.errors import NO_SPACE_ERRORS
from pretrain.data.files import find
from pretrain.data.sources.plain import parse_json
from pretrain.data.tokenizer import load_tokenizer
from pretrain.launcher.site import load_site
from pretrain.model.reach import check_reach
from pretrain.rundir.jobs import check_goes_on
from pretrain.rundir.paths import check_apart, exit_code_of
from tests.unit.test_config import BASE, message, path

__all__ = ["path"]

# A value of the command line: --set -> what the message names beside the file and the key.
VALUES: list[tuple[str, tuple[str, ...]]] = [
    ("train.num_steps=50k", ("'50k'", "valid integer")),
    ("position.method=alibbi", ("'alibbi'", "'alibi'")),
    ("evaluation.lengths=64,256", ("str", "list")),
    ('evaluation.lengths=[64, "256"]', ("evaluation.lengths[1] = '256'",)),
    ("optimizer.learning_rate=inf", ("inf", "finite")),
    ("train.num_steps=", ("missing", "default")),
    ("train.num_steps=3\nx=4", ("'3\\nx=4'",)),
    ("model.num_layers=2.0", ("valid integer", "got float")),
    ("model.num_attention_heads=5", ("not divisible by model.num_attention_heads = 5", "multiple")),
    ("run.directory=$UNSET/runs", ("$UNSET/runs", "UNSET is not set")),
    ("run.directory=${UNSET}", ("UNSET is not set", "export UNSET=")),
    ("run.directory=$EMPTY/runs", ("EMPTY",)),
    ("run.directory=$HOLDS_ONE/runs", ("HOLDS_ONE itself contains a variable",)),
    ("parallel.zero_stage=2.0", ("valid integer", "got float")),
    ("data.directory=~nobody-of-this-name/x", ("no such home directory",)),
    ('data.paths=["a", "$UNSET"]', ("$UNSET", "UNSET is not set")),
]
# A key that there is not -> the one that is meant.
KEYS = [
    ("position.methd=", "position.methd", "position.method"),
    ("positions.method=rotary", "positions", "position"),
    ("position.METHOD=rotary", "position.METHOD", "position.method"),
    ("num_layers.x=2", "num_layers", "model.num_layers"),
]


@pytest.mark.parametrize(("override", "names"), VALUES, ids=[row[0][:40] for row in VALUES])
def test_a_value_of_the_command_line(path, monkeypatch, override, names):
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("HOLDS_ONE", "/data/$HOME")
    monkeypatch.delenv("UNSET", raising=False)
    key, said = override.partition("=")[0], message(path, override)
    assert said.startswith(f"{path}: ") and key in said.splitlines()[0]
    assert all(name in said for name in names), said


def test_a_setting_without_a_value(path):
    assert "--set train.num_steps: expected section.key=value" in message(path, "train.num_steps")


@pytest.mark.parametrize(("override", "wrong", "right"), KEYS)
def test_a_key_that_there_is_not(path, override, wrong, right):
    assert f"{wrong}: no such key, did you mean {right}?" in message(path, override)


# What cannot be read as a config -> what the message names beside the file.
FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a torn section": (b"[run\n", ("not a readable config file", "line 1")),
    "no value": (b"a = \n", ("not a readable config file", "line 1")),
    "a section twice": (b"[run]\n[run]\n", ("not a readable config file", "line 2")),
    "nothing": (b"", ("model.num_layers: missing", "optimizer.learning_rate: missing")),
    "a key without its section": (b"num_steps = 4\n", ("did you mean train.num_steps?",)),
    "binary": (b"\xff\xfe\x00", ("not a readable config file",)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_config(path, name):
    content, names = FILES[name]
    path.write_bytes(content)
    said = message(path)
    assert said.startswith(f"{path}: ") and all(name in said for name in names), said


def test_a_misspelled_key_comes_before_what_is_missing_for_it(path):
    path.write_text(BASE.replace("num_layers", "num_layer"))
    first, second = message(path).splitlines()
    assert "model.num_layer: no such key, did you mean model.num_layers?" in first
    assert "model.num_layers: missing" in second
    path.write_text('bases = "small.toml"\n')
    assert "bases: no such key, did you mean base?" in message(path).splitlines()[0]


@pytest.mark.parametrize("method", ["rotary", "t5", "none"])
def test_a_method_without_a_reach(path, method):
    with pytest.raises(
        ConfigError, match=rf"^position.method = {method}: no limited reach.*ALiBi's"
    ):
        check_reach(load_config(path, [f"position.method={method}"]))


def test_the_config_of_a_run_is_no_site_file(path):
    with pytest.raises(ConfigError, match="the config of a run, not a site file"):
        load_site(path)


def test_sources_and_tokenizers_that_are_not_there_say_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    with pytest.raises(ConfigError, match=r'a directory\. Name its files: "text/\*\*/\*\.txt"'):
        find("data.paths", ("text",))
    fault = parse_json(0, b'{"content": "hello"}', "text").fault
    assert 'no key "text". Set text_field to the key that holds the text' in fault
    with pytest.raises(ConfigError, match="models on the Hub are not looked up by name"):
        load_tokenizer("gpt2")


def test_a_new_run_does_not_move_into_the_directory_of_a_data_set(path, tmp_path):
    data = tmp_path / "data"
    inside = data / "runs" / "a"
    for run in (data, inside):
        check_goes_on(load_config(path, [f"run.directory={run}"]))
    for split in ("train", "validation"):
        manifest = data / split / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    for run in (data, inside):
        with pytest.raises(ConfigError, match=r"data holds a data set\. Give the run a directory"):
            check_goes_on(load_config(path, [f"run.directory={run}"]))
        # What `pretrain train` and `pretrain import` ask.
        with pytest.raises(ConfigError, match="holds a data set"):
            check_apart(run)
    check_goes_on(load_config(path, [f"run.directory={tmp_path / 'beside'}"]))
    # A run that lies there already goes on.
    (inside / "attempts" / "0001").mkdir(parents=True)
    check_goes_on(load_config(path, [f"run.directory={inside}"]))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "are free). Make room"),
        (errno.EDQUOT, "are free). Make room"),
        (errno.EACCES, "right to"),
        (errno.EROFS, "mounted"),
        (errno.ESTALE, "file server has lost it"),
        (errno.ENAMETOOLONG, "shorter path"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_each_refusal_of_the_file_system_has_its_own_remedy(tmp_path, number, words):
    kind = NoSpace if number in NO_SPACE_ERRORS else RunFailed
    for error in (
        OSError(number, os.strerror(number)),
        RuntimeError(f"I/O error: {os.strerror(number)} (os error {number})"),
    ):
        with pytest.raises(RunFailed) as refused, writing(tmp_path):
            raise error
        said = str(refused.value)
        assert type(refused.value) is kind and str(tmp_path) in said and words in said
        assert ("Make room" in said) == (kind is NoSpace)
    assert exit_code_of(refused.value) == (82 if kind is NoSpace else 1)
