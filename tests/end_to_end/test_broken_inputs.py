"""Wrong input through the real commands: a message that names it, exit code 2, no traceback, and nothing changed."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.commands import LAUNCHER, PRETRAIN, ROOT, Done, fresh, metrics, pretrain, ranks

STEP_4, STEP_8 = "checkpoints/step-00000004", "checkpoints/step-00000008"
WEIGHTS = "__0_0.distcp"


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """What would show a write: every path below `folder` with its size and the time of its last change."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def explained(done: Done, code: int, *words: object) -> None:
    """`done` ended with `code` and lines that begin with "error: ", hold all of `words`, and are no traceback."""
    assert done.code == code, done.text
    assert "Traceback" not in done.text, done.text
    lines = done.err.splitlines()
    assert any(line.startswith("error: ") for line in lines), done.err
    assert all(str(word) in done.err for word in words), (words, done.err)


@pytest.fixture
def refused(workspace: Path) -> Callable[..., None]:
    """refused(arguments, words): exit code 2, a message that holds the words, and a workspace as it was before."""

    def check(arguments: list[object], *words: object) -> None:
        before = contents(workspace)
        explained(pretrain(*arguments), 2, *words)
        assert contents(workspace) == before

    return check


@pytest.fixture(scope="module")
def config(workspace: Path) -> Path:
    return workspace / "run.toml"


@pytest.fixture(scope="module")
def run(workspace: Path, config: Path) -> Path:
    """A run of 8 steps with checkpoints after 4 and 8."""
    assert pretrain("train", config).code == 0
    return workspace / "runs/alibi"


def trained(workspace: Path, name: str, *settings: str) -> Path:
    """A run of two steps under its own name."""
    overrides = [f"run.directory={workspace}/runs/{name}", "train.num_steps=2", "evaluation.lengths=[16]", *settings]
    done = pretrain("train", workspace / "run.toml", *(word for o in overrides for word in ("--set", o)))
    assert done.code == 0, done.err
    return workspace / "runs" / name


def damaged_run(run: Path, name: str) -> Path:
    """A copy of `run` to spoil."""
    copy = run.with_name(name)
    shutil.rmtree(copy, ignore_errors=True)
    return Path(shutil.copytree(run, copy))


@pytest.fixture
def data_copy(tiny_data: Path, tmp_path: Path) -> Path:
    """The data set under another name: links, so a file is replaced, never written to."""
    return Path(shutil.copytree(tiny_data, tmp_path / "data", copy_function=os.link))


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file, whose size stays."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    replace(path, bytes(raw))


# ---- the config ------------------------------------------------------------------------------------------------------
CONFIG_COMMANDS = {
    "config": ["config"],
    "train": ["train"],
    "data build": ["data", "build"],
    "data verify": ["data", "verify"],
    "bench train": ["bench", "train"],
}
SETTINGS = {
    "model.num_layer=2": ["model.num_layer: no such key", "did you mean model.num_layers?"],
    "num_layers.x=2": ["num_layers: no such key", "did you mean model.num_layers?"],
    "model.num_layers=two": ["model.num_layers = 'two'", "valid integer"],
    "model.num_layers=2.0": ["model.num_layers = 2.0", "valid integer", "got float"],
    "train.num_steps=0": ["train.num_steps = 0", "greater than 0"],
    "position.method=alibii": ["position.method = 'alibii'", "'alibi'", "'rotary'"],
    "train.num_steps": ["--set train.num_steps: want section.key=value"],
    "model.num_attention_heads=5": ["model.hidden_size = 32", "not divisible by num_attention_heads = 5", "multiple"],
    "parallel.sequence_parallel=true": ["parallel.sequence_parallel = True", "Leave it out"],
}  # fmt: skip


@pytest.mark.parametrize("command", CONFIG_COMMANDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_setting(refused, config, command, setting):
    refused([*CONFIG_COMMANDS[command], config, "--set", setting], *SETTINGS[setting])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_setting_of_the_launcher(workspace, config, setting):
    before = contents(workspace)
    done = fresh([*LAUNCHER, "local", str(config), "--nproc", "2", "--set", setting])
    explained(done, 2, *SETTINGS[setting])
    assert contents(workspace) == before


FILES: dict[str, tuple[bytes | None, list[str]]] = {
    "missing.toml": (None, ["no such config file"]),
    "torn.toml": (b"[model\nnum_layers = 2", ["not valid TOML", "line 1"]),
    "latin1.toml": (b"# caf\xe9\n", ["not a readable config file", "utf-8"]),
    "empty.toml": (b"", ["model: missing", "train: missing"]),
    "flat.toml": (b"num_layers = 2\n", ["num_layers: no such key", "did you mean model.num_layers?"]),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", CONFIG_COMMANDS)
def test_a_config_file_that_cannot_be_read(tmp_path, command, name):
    content, words = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    explained(pretrain(*CONFIG_COMMANDS[command], tmp_path / name), 2, f"error: {tmp_path / name}: ", *words)


def test_a_directory_is_no_config_file(refused, workspace):
    refused(["train", workspace], f"{workspace}: not a readable config file", "Is a directory")


def test_what_is_wrong_shows_before_torch_is_imported(config, tmp_path):
    """Real processes, in which importing torch is fatal: quick answers on a login node, which may have no torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os\nos._exit(99)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    assert fresh([sys.executable, "-c", "import torch"], environment).code == 99
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    bad = [str(config), "--set", "model.num_layers=two"]
    commands = [[*PRETRAIN, *CONFIG_COMMANDS[name], *bad] for name in CONFIG_COMMANDS]
    commands.append([*LAUNCHER, "local", *bad, "--nproc", "2"])
    for command in commands:
        explained(fresh(command, environment), 2, "model.num_layers = 'two'")
    assert fresh([*PRETRAIN, "config", str(config)], environment).code == 0
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which other work on the machine does not lengthen: 0.15 s a command on the slowest machine seen.
    assert (end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime) / 7 < 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train"], "CONFIG"),
        (["train", "run.toml", "--resume"], "--resume"),
        (["train", "run.toml", "--step", "3"], "--step"),
        (["evaluate"], "RUN|CHECKPOINT"),
        (["evaluate", "run", "--stride", "many"], "--stride"),
        (["export", "run"], "OUT"),
        (["bench", "train", "run.toml", "--steps", "0"], "--steps"),
        (["trane"], "trane"),
    ],
)
def test_a_wrong_command_line(arguments, word):
    done = pretrain(*arguments)
    assert done.code == 2 and word in done.err, done.text
    assert "Traceback" not in done.text


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_processes_that_cannot_share_a_run(refused, workspace, config):
    tensor = ["--set", "parallel.tensor_model_parallel_size=2"]
    refused(["train", config, *tensor], "parallel.tensor_model_parallel_size", "does not divide the 1 process", "Start")
    planned = ["--set", "parallel.world_size=2"]
    refused(["train", config, *planned], "parallel.world_size = 2", "the run was started with 1 process", "Start 2")
    refused(["train", config, "--set", "train.precision=fp16"], "train.precision = fp16", "Use bf16 or fp32")
    before = contents(workspace)
    done = fresh([*LAUNCHER, "local", str(config), "--nproc", "3"])
    explained(done, 2, "batch.global_batch_size = 8: not divisible by", "3 data-parallel ranks", "Choose a multiple")
    assert contents(workspace) == before


def test_slurm_without_a_first_host(config):
    environment = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ""}
    done = ranks(["train", config], [environment])[0]
    explained(done, 2, "SLURM_JOB_NODELIST = ''", "Set MASTER_ADDR")


# ---- data ------------------------------------------------------------------------------------------------------------
def test_data_that_is_not_built(refused, config, run, tmp_path):
    setting = ["--set", f"data.directory={tmp_path}/none"]
    remedy = f"{tmp_path}/none/train/manifest.json", "no finished data set", "`pretrain data build CONFIG`"
    refused(["train", config, *setting], *remedy)
    refused(["data", "verify", config, *setting], *remedy)
    refused(["evaluate", run, *setting], f"{tmp_path}/none/validation/manifest.json", "`pretrain data build CONFIG`")
    assert not (tmp_path / "none").exists()


def test_a_truncated_shard(refused, config, run, data_copy):
    setting = ["--set", f"data.directory={data_copy}"]
    for split, last in (("train", "shard-000010.tar"), ("validation", "shard-000000.tar")):
        shard = data_copy / split / last
        whole = shard.read_bytes()
        replace(shard, whole[:-512])
        words = f"{shard}: truncated: {len(whole) - 512} bytes found, {len(whole)} expected", "Restore it"
        for command in (["train", config], ["data", "verify", config], ["data", "build", config]):
            refused([*command, *setting], *words)
        if split == "validation":
            refused(["evaluate", run, *setting], *words)
        replace(shard, whole)
    assert pretrain("data", "verify", config, *setting).code == 0


@pytest.mark.parametrize("name", ["train/shard-000003.tar", "validation/index.npy", "train/manifest.json"])
def test_a_missing_file_of_the_data(refused, config, data_copy, name):
    (data_copy / name).unlink()
    refused(["train", config, "--set", f"data.directory={data_copy}"], data_copy / name, "data build CONFIG")


def test_a_flipped_bit_in_the_data(refused, config, data_copy):
    setting = ["--set", f"data.directory={data_copy}"]
    shard, index = data_copy / "train/shard-000005.tar", data_copy / "validation/index.npy"
    flip(shard)
    refused(["data", "verify", config, *setting], f"{shard}: damaged: its SHA-256 is", "Restore it")
    flip(shard)
    flip(index)
    refused(["data", "verify", config, *setting], f"{index}: damaged", "Restore it")
    refused(["train", config, *setting], f"{index}: damaged", "Restore it")


def test_the_tokenizer_of_another_data_set(refused, config, run, data_copy, tmp_path):
    settings = ["data.source=text", f'data.paths=["{ROOT}/LICENSE"]', f"data.directory={tmp_path}/other",
                "data.validation_fraction=0.3"]  # fmt: skip
    done = pretrain("data", "build", config, *(word for s in settings for word in ("--set", s)))
    assert done.code == 0, done.err
    replace(data_copy / "tokenizer.model", (tmp_path / "other/tokenizer.model").read_bytes())
    setting = ["--set", f"data.directory={data_copy}"]
    words = f"{data_copy}/tokenizer.model: wrong tokenizer", "SHA-256", "Restore it"
    for command in (["train", config], ["evaluate", run], ["data", "verify", config], ["data", "build", config]):
        refused([*command, *setting], *words)


def test_a_vocabulary_that_is_not_the_datas(refused, config, tiny_data):
    setting = ["--set", "data.vocab_size=600"]
    refused(["train", config, *setting], "data.vocab_size = 600", "has 512", "Set data.vocab_size=512")
    refused(["data", "build", config, *setting], f"data.directory = {tiny_data}", "data.vocab_size was 512, is 600")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (['data.paths=["none/*.txt"]'], ["data.paths = 'none/*.txt': no such file", "glob pattern"]),
        (['data.paths=["{folder}/binary.txt"]'], ["binary.txt: byte 2 is not UTF-8", "iconv"]),
        (['data.paths=["{folder}/few.txt"]'], ["data.vocab_size = 512", "or less, or add text"]),
        (['data.paths=["{folder}/bad.jsonl"]', "data.source=jsonl"], ["bad.jsonl:1", '{"text": "..."}']),
        (['data.paths=["{folder}/few.txt"]', "data.tokenizer={folder}/few.txt"], ["few.txt: not a SentencePiece model"]),
    ],
)  # fmt: skip
def test_text_that_cannot_be_built_from(refused, config, tmp_path, settings, words):
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    (tmp_path / "few.txt").write_text("to be or not to be\n" * 20)
    (tmp_path / "bad.jsonl").write_text('{"txt": "a"}\n{"text": "b"}\n')
    settings = ["data.source=text", f"data.directory={tmp_path}/built", *(s.format(folder=tmp_path) for s in settings)]
    refused(["data", "build", config, *(word for s in settings for word in ("--set", s))], *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "binary.txt", "few.txt"]


def test_a_data_directory_that_is_something_else(refused, config, tmp_path):
    (tmp_path / "mine").write_text("kept")
    setting = ["--set", f"data.directory={tmp_path}/mine"]
    refused(["data", "build", config, *setting], f"data.directory = {tmp_path}/mine", "no finished data set", "Choose")
    assert (tmp_path / "mine").read_text() == "kept"


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _truncate(path: Path) -> None:
    replace(path, path.read_bytes()[:-100])


SPOILED = {
    "flipped bit": (WEIGHTS, flip, ["its SHA-256 is not the manifest's"]),
    "truncated": (WEIGHTS, _truncate, ["bytes, the manifest says"]),
    "missing weights": (WEIGHTS, Path.unlink, ["missing"]),
    "other config": ("config.toml", flip, ["its SHA-256 is not the manifest's"]),
    "missing config": ("config.toml", Path.unlink, ["missing"]),
    "torn state": ("state.json", lambda path: path.write_text("{"), ["1 bytes, the manifest says"]),
    "torn manifest": ("manifest.json", lambda path: path.write_text("{"), ["not a manifest"]),
    "other manifest": ("manifest.json", lambda path: path.write_text("[]"), ["not a manifest"]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_checkpoint(refused, config, run, tmp_path, name):
    file, spoil, words = SPOILED[name]
    copy = damaged_run(run, "damaged")
    spoil(copy / STEP_8 / file)
    remedy = f"The checkpoint is damaged. The one before it is {copy / STEP_4}"
    train = ["train", config, "--set", f"run.directory={copy}", "--set", "train.num_steps=12"]
    for command in (["evaluate", copy], ["export", copy, tmp_path / "hf"], train):
        refused(command, copy / STEP_8 / file, *words, remedy)
    assert not list(tmp_path.iterdir())


def test_the_remedy_for_a_damaged_checkpoint(config, run):
    """What the message says works: the run goes on from the earlier checkpoint, and a sound one takes the other's place."""
    copy = damaged_run(run, "repaired")
    flip(copy / STEP_8 / WEIGHTS)
    done = pretrain("train", config, "--resume", copy / STEP_4, "--set", f"run.directory={copy}")
    assert done.code == 0 and f"{copy}: going on from step 4, to step 8" in done.err, done.err
    assert pretrain("evaluate", copy, "--lengths", "32").code == 0
    assert (copy / STEP_8 / WEIGHTS).read_bytes() == (run / STEP_8 / WEIGHTS).read_bytes()
    assert not list((copy / "checkpoints").glob(".*"))


def test_a_damaged_checkpoint_without_an_earlier_one(refused, run):
    copy = damaged_run(run, "single")
    shutil.rmtree(copy / STEP_4)
    flip(copy / STEP_8 / WEIGHTS)
    refused(["evaluate", copy], "there is no earlier one", "train anew in another run.directory")


def test_an_incomplete_checkpoint_is_passed_over(refused, run):
    copy = damaged_run(run, "incomplete")
    (copy / STEP_8 / "manifest.json").unlink()
    refused(["evaluate", copy / STEP_8], f"{copy / STEP_8}: not a complete checkpoint, it has no manifest.json")
    done = pretrain("evaluate", copy, "--lengths", "32", "--out", copy / "report/curve.json")
    assert done.code == 0 and str(copy / STEP_4) in (copy / "report/curve.json").read_text()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.hidden_size=64", ["model.hidden_size = 64", "was trained with 32"]),
        ("position.method=rotary", ["position.method = rotary", "was trained with alibi"]),
    ],
)
def test_another_model_than_the_checkpoints(refused, config, run, setting, words):
    refused(["train", config, "--set", setting], *words, run / STEP_8, "Keep it", "another run.directory")
    refused(["evaluate", run, "--set", setting], *words, run / STEP_8)


def test_resume(refused, config, run, tmp_path):
    refused(["train", config, "--resume", "none"], f"{run}: has checkpoints", "--resume auto", "another run.directory")
    refused(["train", config, "--resume", tmp_path / "gone"], f"{tmp_path}/gone: no such directory", "Give a run's")
    refused(["train", config, "--resume", tmp_path], f"{tmp_path}: neither a run nor a checkpoint", "Give a run's")


# ---- what is written to ----------------------------------------------------------------------------------------------
def test_a_run_directory_that_cannot_be_one(refused, workspace, config):
    for directory in (config, config / "below"):
        refused(
            ["train", config, "--set", f"run.directory={directory}"], f"run.directory = {directory}", "Choose another"
        )
    before = contents(workspace)
    done = fresh([*LAUNCHER, "local", str(config), "--nproc", "2", "--set", f"run.directory={config}"])
    explained(done, 2, "run.directory: cannot make", config, "Choose another")
    assert contents(workspace) == before


def test_a_full_disk_while_training(workspace, config):
    """Exit code 1; no checkpoint is half there, and once there is room the same command goes on."""
    directory = workspace / "runs/full"
    command = ["train", config, "--set", f"run.directory={directory}"]
    explained(pretrain(*command, largest_file=800), 1, f"{directory}: cannot be written (File too large", "Make room")
    done = pretrain(*command, largest_file=20_000)
    explained(done, 1, f"{directory / STEP_4}: cannot be written", "Make room")
    assert not list((directory / "checkpoints").iterdir())
    done = pretrain(*command)
    assert done.code == 0, done.err
    assert [r["step"] for r in metrics(directory) if "evaluation" not in r] == list(range(1, 9))


def test_a_full_disk_while_building_data(config, tmp_path):
    command = ["data", "build", config, "--set", f"data.directory={tmp_path}/data"]
    done = pretrain(*command, largest_file=50_000)
    explained(done, 1, f"{tmp_path}/data: cannot be written (File too large)", "Make room")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_exporting(run, tmp_path):
    out = tmp_path / "hf"
    assert pretrain("export", run, out).code == 0
    before = contents(tmp_path)
    explained(pretrain("export", run, out, largest_file=20_000), 1, f"{out}: cannot be written", "File too large")
    assert contents(tmp_path) == before  # the earlier export, whole
    explained(pretrain("export", run, out / "config.json/hf"), 1, f"{out}/config.json/hf: cannot be written")
    assert contents(tmp_path) == before


def test_a_full_disk_while_reporting(run, tmp_path):
    out = tmp_path / "curve.json"
    done = pretrain("evaluate", run, "--lengths", "32", "--out", out, largest_file=2_000)
    explained(done, 1, f"{out}: cannot be written (File too large)", "Make room")
    assert "perplexity" in done.out  # the numbers are not lost
    assert not out.exists()


# ---- evaluation and export -------------------------------------------------------------------------------------------
def test_what_is_no_run(refused, workspace, config, tmp_path):
    for path, what in ((tmp_path / "gone", "no such directory"), (workspace, "neither a run nor a checkpoint"),
                       (config, "neither a run nor a checkpoint")):  # fmt: skip
        refused(["evaluate", path], f"{path}: {what}", "Give a run's directory")
        refused(["export", path, tmp_path / "hf"], f"{path}: {what}", "Give a run's directory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "abc"], ["--lengths abc: want tokens, comma-separated, as in 128,256,512"]),
        (["--lengths", ""], ["--lengths : want tokens"]),
        (["--lengths", "32,0"], ["evaluation.lengths = 0", "Choose 1 or more"]),
        (["--protocols", "foo"], ["--protocols foo: there are nonoverlapping and sliding"]),
        (["--lengths", "32,64", "--stride", "48"], ["evaluation.stride = 48", "shortest window of 32", "no longer"]),
        (["--stride", "0"], ["--stride 0: want 1 or more"]),
        (["--max-tokens", "-5"], ["--max-tokens -5: want 1 or more"]),
        (["--out", "{folder}/report"], ["--out {folder}/report: want a file that ends in .json"]),
        (["--out", "{folder}/run.toml/curve.json"], ["--out {folder}/run.toml/curve.json", "Choose another"]),
        (["--set", "data.sequence_length=64"], ["data.sequence_length = 64", "trained at 32", "--lengths"]),
    ],
)
def test_what_cannot_be_evaluated(refused, workspace, run, options, words):
    options, words = ([text.format(folder=workspace) for text in texts] for texts in (options, words))
    refused(["evaluate", run, *options], *words)


def test_training_lengths_are_not_mixed(refused, workspace, run):
    other = trained(workspace, "short", "data.sequence_length=16")
    refused(["evaluate", run, other], other, "trained at 16 tokens, the first at 32", "one by one")


def test_a_learned_table_has_an_end(refused, workspace):
    learned = trained(workspace, "learned", "position.method=learned")
    words = "evaluation.lengths = 64", "the learned position table holds 32 positions", "Evaluate within it"
    refused(["evaluate", learned, "--lengths", "32,64"], *words)
    assert pretrain("evaluate", learned, "--lengths", "16,32").code == 0


@pytest.mark.parametrize("method", ["t5", "learned"])
def test_what_has_no_stock_class_is_not_exported(refused, workspace, tmp_path, method):
    source = trained(workspace, f"export-{method}", f"position.method={method}")
    refused(["export", source, tmp_path / "hf"], f"position.method = {method}: ", "to export, train with alibi")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_export(refused, workspace, run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(["export", run, tmp_path], f"{tmp_path}: exists and is no earlier export", "Choose another folder")
    refused(["export", run, tmp_path / "notes.txt"], "exists and is no earlier export", "Choose another folder")
    curve = ["--curve", tmp_path / "notes.txt"]
    refused(
        ["export", run, tmp_path / "hf", *curve], f"--curve {tmp_path}/notes.txt: not a curve.json", "evaluate --out"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"] and (tmp_path / "notes.txt").read_text() == "mine"
