"""Check `base = "other.toml"`: what is merged, what is refused, and where each value comes from."""

import random
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from pretrain.cli.commands import app
from pretrain.config import ConfigError, dump_config, load_config, load_with_origins
from pretrain.config.toml import leaves, merged, read_layers

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/demo.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return str(refused.value)


# ---- what a file says together with its bases ----------------------------------------------------
def tree(chance: random.Random, depth: int = 3) -> dict[str, object]:
    """Return a random table; its names are few, so that two tables have many in common."""
    table: dict[str, object] = {}
    for name in chance.sample("abcd", chance.randint(0, 4)):
        kinds = [chance.randint(0, 9), [chance.randint(0, 9)], {}]
        if depth and chance.random() < 0.6:
            kinds = [tree(chance, depth - 1)]
        table[name] = chance.choice(kinds)
    return table


def paths(table: dict[str, object], before: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Return the values of a table by their paths; an empty table says nothing."""
    found: dict[tuple[str, ...], object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= paths(value, (*before, key))
        else:
            found[*before, key] = value
    return found


def test_merging_is_that_of_a_list_of_paths():
    """A value of the overlay takes away what lies on its path in the base, above it or below."""
    chance = random.Random(0)
    both = 0
    for _ in range(2000):
        base, overlay = tree(chance), tree(chance)
        expected = {
            path: value
            for path, value in paths(base).items()
            if not any(
                path[: len(new)] == new or new[: len(path)] == path for new in paths(overlay)
            )
        }
        both += 0 < len(expected) < len(paths(base))
        before = repr((base, overlay))
        # An empty table over a value makes an empty table of it, which a list of paths cannot say.
        if any(isinstance(empty, dict) for _, empty in leaves(overlay)):
            continue
        assert paths(merged(base, overlay)) == expected | paths(overlay)
        assert repr((base, overlay)) == before
    assert both > 100


def test_an_empty_section_changes_nothing(tmp_path):
    path = write(tmp_path / "mine.toml", f'base = "{DEMO}"\n[model]\n[data]\n[data.corpora]\n')
    assert load_config(path) == load_config(DEMO)


def test_the_order_of_layers_is_the_order_of_the_chain(tmp_path):
    """Eight levels that set random keys: the file nearest to the top wins, and is the origin."""
    chance = random.Random(1)
    for trial in range(30):
        said: dict[str, tuple[str, int]] = {}
        for level in range(8):
            file = tmp_path / f"{trial}/{level}.toml"
            values: dict[str, object] = {"base": f"{level - 1}.toml"} if level else {}
            for section in chance.sample("abc", 2):
                table: dict[str, object] = {}
                for key in chance.sample("xyz", chance.randint(1, 3)):
                    table[key] = chance.randint(0, 10**9)
                    said[f"{section}.{key}"] = (str(file), table[key])
                table["inner"] = {"deep": level}
                said[f"{section}.inner.deep"] = (str(file), level)
                values[section] = table
            write(file, tomli_w.dumps(values))
        layered = read_layers(file)
        assert layered.origins == {key: origin for key, (origin, _) in said.items()}
        assert dict(leaves(layered.values)) == {key: value for key, (_, value) in said.items()}
        assert len(layered.files) == 8


def test_a_base_is_looked_for_from_the_file_that_names_it(tmp_path, monkeypatch):
    write(tmp_path / "a/base.toml", DEMO.read_text())
    path = write(tmp_path / "a/b/mine.toml", 'base = "../base.toml"\n[train]\nnum_steps = 99\n')
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "a/b", tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        for name in (path, tmp_path / "link/mine.toml"):
            assert load_config(name).train.num_steps == 99
    monkeypatch.setenv("FAMILY", str(tmp_path / "a"))
    path.write_text('base = "$FAMILY/base.toml"\n')
    assert load_config(path) == load_config(DEMO)


def test_a_link_above_a_base_does_not_lead_to_another_file(tmp_path):
    """`link/../base.toml` is beside the folder that the link leads to, not beside the link."""
    write(tmp_path / "real/base.toml", DEMO.read_text())
    write(tmp_path / "base.toml", DEMO.read_text().replace("num_steps = 320", "num_steps = 77"))
    write(tmp_path / "real/inner/mine.toml", 'base = "../base.toml"\n')
    (tmp_path / "link").symlink_to(tmp_path / "real/inner")
    assert load_config(tmp_path / "link/mine.toml").train.num_steps == 320


def test_keys_and_tables_of_a_base_can_be_removed(tmp_path):
    base = tmp_path / "base.toml"
    corpora = "".join(
        f'[data.corpora.{name}]\npaths = ["{name}.txt"]\n' for name in ("books", "news", "stories")
    )
    text = DEMO.read_text().replace('source = "shakespeare"\n', "")
    write(base, f"{text}\n[parallel]\nworld_size = 2\n\n{corpora}")
    assert load_config(base).parallel.world_size == 2
    path = write(
        tmp_path / "mine.toml",
        'base = "base.toml"\n'
        'remove = ["parallel.world_size", "data.corpora.stories", "evaluation"]\n',
    )
    config = load_config(path)
    assert config.parallel.world_size is None and set(config.data.corpora) == {"books", "news"}
    assert config.evaluation.interval_steps is None
    # A table that is removed and written again has what is written alone.
    path.write_text(
        'base = "base.toml"\nremove = ["data.corpora"]\n[data.corpora.mine]\npaths = ["m.txt"]\n'
    )
    assert set(load_config(path).data.corpora) == {"mine"}
    path.write_text('base = "base.toml"\nremove = ["data.corpora"]\n[data]\npaths = ["m.txt"]\n')
    assert load_config(path).data.paths == ("m.txt",)
    above = write(tmp_path / "above.toml", 'base = "mine.toml"\n[parallel]\nworld_size = 1\n')
    assert load_config(above).parallel.world_size == 1


# ---- what is refused -----------------------------------------------------------------------------
def test_a_base_that_is_missing_is_named_with_the_file_that_asks(tmp_path):
    path = write(tmp_path / "mine.toml", 'base = "bases/one.toml"\n')
    expected = f'{path}: base = "bases/one.toml": no such config file ({tmp_path}/bases/one.toml)'
    assert message(path).startswith(expected)
    one = write(tmp_path / "bases/one.toml", 'base = "two.toml"\n')
    assert message(path).startswith(f'{one}: base = "two.toml": no such config file')


@pytest.mark.parametrize("length", [1, 3])
def test_a_circle_is_refused_with_its_chain(tmp_path, length):
    files = [tmp_path / f"{number}.toml" for number in range(length)]
    for number, file in enumerate(files):
        write(file, f'base = "{(number + 1) % length}.toml"\n')
    chain = " -> ".join(map(str, [*files, files[0]]))
    last = files[-1]
    assert message(files[0]) == (
        f'{last}: base = "0.toml": goes round in a circle: {chain}. Remove one of these bases'
    )


def test_a_circle_through_a_link_is_refused(tmp_path):
    path = write(tmp_path / "mine.toml", 'base = "link.toml"\n')
    (tmp_path / "link.toml").symlink_to(path)
    assert "goes round in a circle" in message(path)
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    path.write_text('base = "loop.toml"\n')
    assert "not a readable config file, the base of" in message(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base = 3\n", "base = 3: expected the name of one config file"),
        ('base = ""\n', "base = '': is empty"),
        ('base = "$NOT_SET_ANYWHERE/a.toml"\n', "the variable NOT_SET_ANYWHERE is not set"),
        (f'base = "{"x" * 5000}.toml"\n', "not a readable config file, the base of"),
        ('base = "bad.toml"\n', "bad.toml: not valid TOML, the base of"),
        (f'base = "{DEMO}"\nremove = "a.b"\n', "remove = 'a.b': expected a list of keys"),
        (f'base = "{DEMO}"\nremove = ["train.num_step"]\n', 'remove = "train.num_step": the base'),
        (f'base = "{DEMO}"\nremove = [""]\n', "has no such key"),
        ('remove = ["train.num_steps"]\n', "the file names none"),
        ('[run]\nbase = "a.toml"\n', "run.base: no such key; base stands at the top of a file"),
    ],
)
def test_what_is_no_base_is_refused(tmp_path, text, expected):
    write(tmp_path / "bad.toml", "[train\n")
    path = write(tmp_path / "mine.toml", text)
    said = message(path)
    assert expected in said and str(path) in said


def test_a_message_names_the_file_in_which_the_value_stands(tmp_path):
    base = write(
        tmp_path / "base.toml",
        '[model]\nnum_layers = "4"\nhiden_size = 3\n[data.corpora.x]\npaths = [1]\n'
        "[run]\nseed = 1\n[surprise]\nx = 1\n",
    )
    path = write(
        tmp_path / "mine.toml",
        'base = "base.toml"\n[run]\nname = "x"\n[batch]\nmicro_batch_size = 0\n',
    )
    lines = message(path).splitlines()
    by_key = {line.split(": ")[1].split(" ")[0]: line for line in lines}
    in_base = f"{base} (a base of {path}): "
    for key in ("model.num_layers", "model.hiden_size", "data.corpora.x.paths[0]", "surprise"):
        assert by_key[key].startswith(f"{in_base}{key}"), key
    # What is wrong in the file itself, and what stands nowhere although its section is the base's.
    for key in ("run.name", "batch.micro_batch_size", "model.hidden_size", "optimizer"):
        assert by_key[key].startswith(f"{path}: {key}"), key


def test_a_rule_names_the_file_of_the_key_that_it_names(tmp_path):
    base = write(tmp_path / "base.toml", DEMO.read_text())
    path = write(tmp_path / "mine.toml", 'base = "base.toml"\n[train]\nnum_steps = 10\n')
    assert message(path).startswith(f"{base} (a base of {path}): schedule.lr_warmup_steps = 50: ")
    path.write_text('base = "base.toml"\n[schedule]\nlr_warmup_steps = 400\n')
    assert message(path).startswith(f"{path}: schedule.lr_warmup_steps = 400: ")
    path.write_text('base = "base.toml"\n')
    said = message(path, "schedule.lr_warmup_steps=400")
    assert said.startswith(f"{path}: --set schedule.lr_warmup_steps = 400: ")
    base.write_text(DEMO.read_text().replace('"runs/demo/data"', '"$NOT_SET_ANYWHERE/x"'))
    assert message(path).startswith(f"{base} (a base of {path}): data.directory = $NOT_SET")


# ---- where each value comes from -----------------------------------------------------------------
def values_of(text: str) -> dict[str, object]:
    """Return the values of a config file by their dotted keys; an empty table has none."""
    return {".".join(path): value for path, value in paths(tomllib.loads(text)).items()}


def test_the_origin_of_every_value_is_the_file_that_holds_it(tmp_path):
    base = write(tmp_path / "base.toml", DEMO.read_text())
    path = write(
        tmp_path / "mine.toml",
        'base = "base.toml"\nremove = ["evaluation.max_tokens", "checkpoint"]\n'
        "[model]\nnum_layers = 4\n[run]\nseed = 1234\n",
    )
    overrides = ["train.num_steps=400", "data.vocab_size=", "logging.wandb=disabled"]
    config, origins = load_with_origins(path, overrides)
    assert config == load_config(path, overrides)
    assert set(origins) | {"config_version"} == set(values_of(dump_config(config)))
    # Values that are also the default's, or the base's, stand where they are written.
    for key, expected in {
        "model.num_layers": str(path),
        "run.seed": str(path),
        "run.directory": str(base),
        "model.hidden_size": str(base),
        "evaluation.lengths": str(base),
        "train.num_steps": "--set",
        "logging.wandb": "--set",
        "data.vocab_size": "default",
        "checkpoint.interval_steps": "default",
        "optimizer.adam_beta1": "default",
    }.items():
        assert origins[key] == expected, key
    written = set(values_of(DEMO.read_text()))
    removed = {"evaluation.max_tokens", "checkpoint.interval_steps"}
    mine = {"model.num_layers", "run.seed", "train.num_steps", "data.vocab_size"}
    assert {key for key, file in origins.items() if file == str(base)} == written - removed - mine


def pretrain(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_pretrain_config_says_where_each_value_comes_from_and_loads_again(tmp_path):
    odd = tmp_path / "bad\nname = 1 # \x01 \u2028.toml"
    write(odd, DEMO.read_text().replace('"runs/demo/alibi"', '"a # b = \u2028\u0085[x]"'))
    path = write(
        tmp_path / "mine.toml", tomli_w.dumps({"base": odd.name, "model": {"num_layers": 3}})
    )
    for config, overrides in [
        (DEMO, []),
        (path, ["train.num_steps=400", 'evaluation.protocols=["nonoverlapping", "sliding"]']),
        (ROOT / "configs/cc100_roberta/h100/sinusoidal_512.toml", ["run.seed=7"]),
    ]:
        options = [word for each in overrides for word in ("--set", each)]
        text = pretrain("config", config, *options)
        expected, origins = load_with_origins(config, overrides)
        saved = write(tmp_path / "saved.toml", text)
        assert load_config(saved) == expected
        # Each key's line ends in its origin.
        section, found = "", {}
        for line in text.split("\n"):
            if header := re.fullmatch(r"\[(.+)\]", line):
                section = header[1]
            elif section and (pair := re.match(r"(\w+) = ", line)):
                found[f"{section}.{pair[1]}"] = line.rpartition(" # ")[2]
        assert set(found) == set(origins)
        for key, said in found.items():
            whole = origins[key]
            assert (whole if whole.isprintable() else ascii(whole)).endswith(said), key
