"""Compare the messages about mistakes that users make in configs with what they have to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config import ConfigError, load_config, parse_config
from pretrain.data.sources.base import find
from pretrain.data.sources.plain import parse_json
from pretrain.data.tokenizers.base import read_tokenizer
from pretrain.launcher.site import load_site
from pretrain.rundir.jobs import check_goes_on
from pretrain.rundir.paths import check_apart

ROOT = Path(__file__).parents[2]

TEXT = """\
[run]
directory = "runs/small"

[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4

[position]
method = "alibi"

[batch]
micro_batch_size = 2
global_batch_size = 32

[data]
directory = "data/small"
source = "shakespeare"
sequence_length = 64

[optimizer]
learning_rate = 3e-3

[train]
num_steps = 40

[evaluation]
lengths = [64, 256]
"""


def message(path: Path, *overrides: str) -> str:
    """Return what is said about a config that is refused."""
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return str(refused.value)


@pytest.fixture
def path(tmp_path):
    """Return a config that is right."""
    file = tmp_path / "small.toml"
    file.write_text(TEXT)
    load_config(file)
    return file


DIGITS = "Write all of its digits, without a unit, a comma or a space: 50000 or 50_000"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("train.num_steps=50k", DIGITS),
        ("data.vocab_size=32,000", DIGITS),
        ("optimizer.learning_rate=0,003", DIGITS),
        ("optimizer.learning_rate=3 e-3", DIGITS),
        ("position.method=alibbi", 'Did you mean "alibi"?'),
        ("position.method='alibi", 'Did you mean "alibi"?'),
        ("train.precision=bfloat16", 'Did you mean "bf16"?'),
        ("evaluation.lengths=512", "should be a list (got int). Write a list: [512]"),
        ('evaluation.lengths=[64, "256"]', "evaluation.lengths[1] = '256'"),
        ("evaluation.lengths=[]", "an empty list. Name at least one value, or remove the key"),
        ("evaluation.lengths=64,256", "should be a list (got str). Write a list: [64, 256]"),
        ("evaluation.lengths=64 256", "Write a list: [64, 256]"),
        ("evaluation.protocols=sliding,nonoverlapping", '["sliding", "nonoverlapping"]'),
        ("data.paths=a.txt,b.txt", 'Write a list: ["a.txt", "b.txt"]'),
        ("data.paths=my notes.txt", 'Write a list: ["my notes.txt"]'),
        ("train.profile_steps=10", "should be a list (got int)"),
        ("optimizer.learning_rate=.003", "Write it as TOML has numbers: 0.003"),
        ("optimizer.learning_rate=3.e-3", "Write it as TOML has numbers: 0.003"),
        ("train.num_steps=0040", "Write it as TOML has numbers: 40"),
        ("model.hidden_size=none", "The key is needed: set a value"),
    ],
)
def test_a_value_of_the_command_line_is_refused_as_such_with_how_to_write_it(
    path, override, remedy
):
    said = message(path, override)
    assert said.startswith(f"{path}: --set {override.partition('=')[0]}") and remedy in said


def test_a_value_of_the_file_is_not_blamed_on_the_command_line(path):
    path.write_text(TEXT.replace("num_layers = 2", "num_layers = 0"))
    said = message(path, "model.hidden_size=0").splitlines()
    assert said[0].startswith(f"{path}: model.num_layers = 0")
    assert said[1].startswith(f"{path}: --set model.hidden_size = 0")
    with pytest.raises(ConfigError, match=r"^saved: --set train.num_steps = 0"):
        parse_config(load_config_values(path), "saved", ["train.num_steps=0"])


def load_config_values(path: Path) -> dict[str, object]:
    """Return the sections of a right config."""
    path.write_text(TEXT)
    return load_config(path).model_dump(mode="json", exclude_none=True)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lengths = [64, 256]", "lengths = 50k", "'lengths = 50k'. A number has digits alone"),
        ("[64, 256]", "64, 256", "'lengths = 64, 256'. A number has no comma"),
        ("[64, 256]", "64,256", "A list stands in brackets: [64, 256]"),
        ('"alibi"', "alibi", "'method = alibi'. A text stands in quotes"),
        ("num_layers = 2", "num_layers = 2\nnum_layers = 4", "'num_layers = 4'. The key is given"),
        ("[evaluation]", "[model]", "'[model]'. The section begins twice"),
        ("num_steps = 40", "num_steps: 40", "'num_steps: 40'"),
    ],
)
def test_a_line_that_is_no_toml_is_shown(path, old, new, expected):
    path.write_text(TEXT.replace(old, new))
    said = message(path)
    assert said.startswith(f"{path}: not valid TOML: ") and expected in said


def test_a_misspelled_key_comes_before_what_is_missing_for_it(path):
    path.write_text(TEXT.replace("num_layers", "num_layer"))
    first, second = message(path).splitlines()
    assert "model.num_layer: no such key, did you mean model.num_layers?" in first
    assert "model.num_layers: missing" in second
    path.write_text('bases = "small.toml"\n')
    assert "bases: no such key, did you mean base?" in message(path).splitlines()[0]


def test_files_that_are_no_config_are_named_as_what_they_are(path, tmp_path):
    assert f"did you mean {path}?" in message(tmp_path / "smal.toml")
    yaml = tmp_path / "small.yaml"
    yaml.write_text("model:\n  num_layers: 2\n")
    assert "A config is a TOML file" in message(yaml)
    run = tmp_path / "run"
    run.mkdir()
    assert "Is a directory. Name a file in it" in message(run)
    (run / "config.toml").write_text(TEXT)
    assert f"That of a run is {run / 'config.toml'}" in message(run)
    path.write_bytes(TEXT.encode() + b"# f\xfcr\n")
    assert f"line {TEXT.count(chr(10)) + 1} is not UTF-8 (byte 0xfc)" in message(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_of_any_editor_is_the_same_config(path, encoding, end):
    expected = load_config(path)
    path.write_bytes(TEXT.replace("\n", end).replace("num_", "\tnum_").encode(encoding))
    assert load_config(path) == expected


def test_a_study_or_a_site_file_is_no_config_and_the_reverse(path, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text('title = "x"\nconfig = "small.toml"\n[evaluation]\nlengths = [64]\n')
    assert message(study).startswith(f"{study}: a study file, not the config of a run. Its runs")
    site = ROOT / "slurm" / "site.v100.toml"
    assert message(site).startswith(f"{site}: a site file, not the config of a run. Give it as")
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
        read_tokenizer(Path("gpt2"))


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
