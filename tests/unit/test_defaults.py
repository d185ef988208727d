"""A default that is written out is the default: the run is the one without that line."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel

from pretrain.config import ConfigError, dump_config, load_config, num_parameters, parse_config
from pretrain.config.load import CONFIG_VERSION, merged, overridden, read_values
from pretrain.config.trajectory import differences, settings_hash
from pretrain.positions.base import METHODS
from tests.conftest import TINY

CONFIGS = Path(__file__).parents[2] / "configs"


def shipped(name: str, *overrides: str) -> dict[str, Any]:
    """Return what a shipped config and its bases say, with settings laid over it."""
    return overridden(read_values(CONFIGS / f"{name}.toml"), overrides)


BLEND = 'data.corpora={books = {paths = ["b"]}, plays = {source = "shakespeare", epochs = 2.0}}'
BASES = {
    "demo": shipped("demo"),
    "t5": shipped("demo", "position.method=t5"),
    "fewest keys": {
        "run": {"directory": "r"},
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        "batch": {"micro_batch_size": 1, "global_batch_size": 4},
        "data": {"directory": "d", "sequence_length": 32, "paths": ["t"]},
        "optimizer": {"learning_rate": 0.1},
        "train": {"num_steps": 9},
    },
    "blend": shipped("demo", "data.source=", BLEND),
    "slopes": shipped("demo", "position.slopes={first = 0.5, last = 0.1}"),
    "masked": shipped("demo", "train.objective=masked"),
    "adaptive, nag, words": shipped("wikitext103/alibi_512", "position.method=rotary"),
    "1.3B": shipped("cc100_roberta/h100/sinusoidal_512"),
}
"""What people may write: name -> the sections of a file."""


def defaults(model: BaseModel, written: Mapping[str, Any], table: str = "") -> Iterator[Any]:
    """Yield the dotted key and the value of every default that is not written, at any depth.

    Keys whose default is None are not among them: TOML has no null, so such a default can only be
    written by leaving the key out.
    """
    for name, field in type(model).model_fields.items():
        value, here = getattr(model, name), written.get(name, {})
        inner = value if isinstance(value, dict) else {name: value}
        if inner and all(isinstance(each, BaseModel) for each in inner.values()):
            for key, each in inner.items():
                deeper = f"{table}{name}." if each is value else f"{table}{name}.{key}."
                yield from defaults(each, here if each is value else here[key], deeper)
        elif name not in written and field.default is not None:
            yield f"{table}{name}", model.model_dump(mode="json", include={name})[name]


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the tables of a file in which one dotted key stands."""
    outer, dot, inner = key.partition(".")
    return {outer: nested(inner, value) if dot else value}


@pytest.mark.parametrize("name", BASES)
def test_a_default_that_is_written_out_changes_nothing(name: str, tmp_path: Path) -> None:
    """Every key by itself, every section, random choices of keys, and all of them."""
    path, base = tmp_path / "run.toml", BASES[name]
    path.write_text(tomli_w.dumps(base))
    config = load_config(path)
    dump, settings, size = dump_config(config), settings_hash(config, "d"), num_parameters(config)
    all_of_them = dict(defaults(config, base))
    keys = sorted(all_of_them)
    sections = {key.partition(".")[0] for key in keys}
    choices = [[key] for key in keys]
    choices += [[key for key in keys if key.startswith(f"{each}.")] for each in sorted(sections)]
    draw = random.Random(name)
    choices += [draw.sample(keys, draw.randint(2, len(keys))) for _ in range(10)]
    for choice in [*choices, keys]:
        values = base
        for key in choice:
            values = merged(values, nested(key, all_of_them[key]))
        path.write_text(tomli_w.dumps(values))
        found = load_config(path)
        assert (found, dump_config(found)) == (config, dump), choice
        assert differences(config, found) == [] and settings_hash(found, "d") == settings, choice
        assert num_parameters(found) == size, choice
    path.write_text(dump)
    found = load_config(path)
    assert (found, dump_config(found), settings_hash(found, "d")) == (config, dump, settings)
    assert parse_config(tomllib.loads(dump), "dump") == config


@pytest.mark.parametrize("method", METHODS)
def test_a_derived_value_that_is_written_out_changes_nothing(method: str) -> None:
    """The embeddings among them are the same for every position method."""
    base = shipped("demo", f"position.method={method}", "evaluation.lengths=")
    config = parse_config(base, "base")
    derived: dict[str, Any] = {
        "model": {
            "num_query_groups": 8,
            "ffn_hidden_size": 512,
            "embedding_scale": 128**0.5,
            "embedding_init_method_std": 128**-0.5,
        },
        "evaluation": {"lengths": list(config.evaluation_lengths)},
    }
    if method == "learned":
        derived["position"] = {"max_position_embeddings": 128}
    found = parse_config(merged(base, derived), "derived")
    assert settings_hash(found, "d") == settings_hash(config, "d")
    assert {each.key for each in differences(config, found)} == {"evaluation.lengths"}
    assert num_parameters(found) == num_parameters(config)
    assert (found.embedding_scale, found.embedding_init_method_std) == (
        config.embedding_scale,
        config.embedding_init_method_std,
    )
    # Of two spellings that are the same, the width alone is what changed.
    wider = parse_config(base, "wider", ["model.hidden_size=256", "model.ffn_hidden_size=512"])
    assert [each.key for each in differences(config, wider)] == ["model.hidden_size"]
    behind_norm = parse_config(base, "norm", ["model.embedding_layernorm=true"])
    assert behind_norm.embedding_scale == 1


@pytest.mark.parametrize("version", [True, 1.0, "1", [1], {}, 0, 2])
def test_what_merely_equals_the_version_is_another_one(version: object) -> None:
    with pytest.raises(ConfigError, match=f"^f: {re.escape(f'config_version = {version!r}: ')}"):
        parse_config({"config_version": version, **TINY}, "f")


def test_a_file_that_was_dumped_states_its_version_and_another_version_is_refused(
    tmp_path: Path,
) -> None:
    dump = dump_config(parse_config(TINY, "tiny"))
    assert dump.startswith(f"config_version = {CONFIG_VERSION}\n\n[run]\n")
    run, overlay = tmp_path / "config.toml", tmp_path / "mine.toml"
    run.write_text(dump.replace(f"= {CONFIG_VERSION}", "= 99", 1))
    overlay.write_text('base = "config.toml"\n[run]\nseed = 8\n')
    refused = (
        f"{run}: config_version = 99: this version of pretrain reads {CONFIG_VERSION}. Use the "
        "version that wrote the file"
    )
    for file in (run, overlay):
        with pytest.raises(ConfigError, match=f"^{re.escape(refused)}$"):
            load_config(file)
    run.write_text(dump)
    # It is no key of the run, and is written once however often a config is read and written.
    assert dump_config(load_config(overlay)) == dump.replace("seed = 7", "seed = 8")
