"""EleutherAI's lm-evaluation-harness gives the perplexity that `pretrain evaluate` gives."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import shutil
import signal
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import load_config
from pretrain.data.stream import open_stream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.huggingface.folder import is_export_of
from tests.end_to_end.commands import (
    PRETRAIN,
    contents,
    ended,
    explained,
    pretrain,
    sets,
    started,
    succeeds,
    wait_for,
)

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(
    not HAS_LM_EVAL, reason="lm-eval is not installed: pip install lm_eval accelerate"
)

LENGTH, TOKENS = 32, 1024


def lm_eval_version() -> str:
    return importlib.metadata.version("lm_eval")


def id_of(run: Path, step: int = 8) -> str:
    """Return the id of a run's checkpoint."""
    return open_checkpoint(run / f"checkpoints/step-{step:08d}").lineage.id


def score(folder: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> float:
    """Return lm-eval's bits per byte of the task in a folder, as a user computes it."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    # The task names its text from where lm-eval is started.
    monkeypatch.chdir(folder)
    model = HFLM(pretrained=".", device="cpu", dtype="float32", max_length=length, batch_size=4)
    results = lm_eval.simple_evaluate(
        model,
        tasks=["pretrain_validation"],
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
    )
    return float(results["results"]["pretrain_validation"]["bits_per_byte,none"])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@needs_lm_eval
def test_perplexity_through_lm_eval(run, tmp_path, monkeypatch):
    """On one document of whole windows, of which `pretrain evaluate` does not score the end."""
    from lm_eval.models.huggingface import HFLM

    out = tmp_path / "hf"
    done = pretrain("export", run, out, "--set", "export.task_bytes=100_000")
    assert done.code == 0 and "validation.jsonl: the first document" in done.out, done.text
    # lm-eval neither warns nor cuts off below what the model was exported for.
    limit = json.loads((out / "config.json").read_text())["max_position_embeddings"]
    assert HFLM(pretrained=str(out), device="cpu").max_length == limit >= 4 * LENGTH

    tokenizer = load_tokenizer(out / "tokenizer.model")
    [row] = (out / "validation.jsonl").read_text().splitlines()
    text = tokenizer.decode(tokenizer.encode(json.loads(row)["text"])[:TOKENS])
    assert len(tokenizer.encode(text)) == TOKENS
    (out / "validation.jsonl").write_text(json.dumps({"text": text}) + "\n")
    bits = score(out, monkeypatch, LENGTH)

    (tmp_path / "text.txt").write_bytes(text.encode())
    curve = tmp_path / "curve.json"
    window = ["--lengths", LENGTH, "--protocols", "nonoverlapping", "--max-tokens", TOKENS]
    done = succeeds("evaluate", run, "--text", tmp_path / "text.txt", *window, "--out", curve)
    [ours] = json.loads(curve.read_text())["records"]
    assert ours["tokens"] == TOKENS
    nats = bits * math.log(2) * len(text.encode()) / TOKENS
    # A token's loss is the difference of two sums of V = 512 terms, with an error of some 2^-24 of
    # the logits; over the mean of 1,024 tokens it averages out. Measured: 1e-8.
    assert nats == pytest.approx(ours["loss_nats"], abs=1e-6)


@needs_lm_eval
def test_the_task_beside_the_model_runs_as_it_was_written(run, tmp_path, monkeypatch):
    """Every document of it, short ones too, begins after the token that ends one in training."""
    out = tmp_path / "hf"
    succeeds("export", run, out, "--set", "export.task_bytes=3000")
    bits = score(out, monkeypatch, 4 * LENGTH)
    assert 0 < bits < 20


# ---- pretrain evaluate --harness -----------------------------------------------------------------
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {text}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
"""


@pytest.fixture(scope="module")
def tasks(run, workspace) -> Path:
    """A folder with two tasks, whose texts are whole windows of the run's validation text."""
    folder = workspace / "tasks, mine"
    folder.mkdir()
    stream = open_stream(load_config(workspace / "run.toml"), "validation")
    [file] = run.glob("checkpoints/*8/tokenizer.model")
    tokenizer = load_tokenizer(file)
    for name, start in (("one", 0), ("two", TOKENS)):
        text = tokenizer.decode(stream.read(start, TOKENS))
        assert len(tokenizer.encode(text)) == TOKENS
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        (folder / f"{name}.txt").write_bytes(text.encode())
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, text=f"{name}.jsonl"))
    return folder


@needs_lm_eval
def test_the_harness_gives_our_bits_per_byte_of_the_checkpoint(run, tasks, tmp_path):
    """At lengths within and beyond the training length; the export is made once."""
    out, lengths = tmp_path / "lm_eval.json", f"{LENGTH},{4 * LENGTH}"
    words = ["evaluate", run, "--harness", tasks, "--lengths", lengths, "--out", out]
    done = succeeds(*words)
    written = json.loads(out.read_text())
    assert written["lm_eval_version"] == lm_eval_version()
    theirs = {(r["task"], r["window"]): r for r in written["records"]}
    assert len(theirs) == len(written["records"]) == 4
    for name in ("one", "two"):
        curve = tmp_path / name / "curve.json"
        window = ["--lengths", lengths, "--protocols", "nonoverlapping", "--max-tokens", TOKENS]
        succeeds("evaluate", run, "--text", tasks / f"{name}.txt", *window, "--out", curve)
        for record in json.loads(curve.read_text())["records"]:
            found = theirs[name, record["length"]]
            assert (found["step"], found["documents"], found["method"]) == (8, 1, "alibi")
            assert record["tokens"] == TOKENS
            # The same sums of V = 512 terms in another order; see the test above.
            assert found["value"] == pytest.approx(record["bits_per_byte"], abs=1e-6)
            assert f"{found['value']:.6g}" in done.out

    export = run / "exports/step-00000008"
    assert is_export_of(export, id_of(run), LENGTH)
    before = contents(export)
    again = pretrain("evaluate", run, "--harness", tasks / "one.yaml", cwd=tmp_path)
    assert again.code == 0 and f"{export}: this checkpoint's export" in again.out, again.text
    assert contents(export) == before


def test_an_export_proves_what_it_was_made_from(run, tmp_path):
    """By the id of its checkpoint, its length and its files; lm-eval is not needed for this."""
    out, other = tmp_path / "hf", tmp_path / "other"
    succeeds("export", run, out, "--max-length", 600)
    assert is_export_of(out, id_of(run), 600)
    assert not is_export_of(out, id_of(run), 601)
    assert not is_export_of(out, id_of(run, 4), 600)
    shutil.copytree(out, other)
    (other / "notes.txt").write_text("not the export's")
    assert not is_export_of(other, id_of(run), 600)
    (other / "notes.txt").unlink()
    assert is_export_of(other, id_of(run), 600)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert not is_export_of(other, id_of(run), 600)
    # An export that was not compared to its end says nothing about its checkpoint.
    record = json.loads((out / "pretrain.files.json").read_text())
    (out / "pretrain.files.json").write_text(json.dumps({"sha256": record["sha256"]}))
    assert not is_export_of(out, id_of(run), 600)


@pytest.mark.torture
@needs_lm_eval
def test_an_export_is_used_again_for_what_it_is_and_not_for_its_name(run, tasks, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    shutil.rmtree(moved / "exports", ignore_errors=True)
    earlier = moved / "checkpoints/step-00000004"
    succeeds("export", moved, moved / "hf")
    words = ["evaluate", "--harness", tasks / "one.yaml"]
    done = pretrain(*words, moved)
    assert done.code == 0 and f"{moved / 'hf'}: this checkpoint's export" in done.out, done.text
    # Another checkpoint is another model.
    done = pretrain(*words, earlier)
    assert done.code == 0 and (moved / "exports/step-00000004").is_dir(), done.text
    # So is an export that somebody has changed, and one whose tokenizer splits otherwise.
    weights = moved / "hf/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = pretrain(*words, moved)
    assert done.code == 0 and (moved / "exports/step-00000008").is_dir(), done.text
    # A name is no proof: the later checkpoint's export under the earlier one's name.
    shutil.rmtree(moved / "exports/step-00000004")
    (moved / "exports/step-00000008").rename(moved / "exports/step-00000004")
    done = pretrain(*words, earlier)
    assert done.code == 0 and "made earlier" not in done.out, done.text
    assert is_export_of(moved / "exports/step-00000004", id_of(moved, 4), LENGTH)


@needs_lm_eval
def test_the_export_s_own_task_and_a_checkpoint_without_a_run(run, tmp_path):
    alone = tmp_path / "alone"
    shutil.copytree(run / "checkpoints/step-00000008", alone)
    done = pretrain("evaluate", alone, "--harness", "pretrain_validation")
    assert done.code == 0 and "byte_perplexity" in done.out, done.text
    # It was exported to a temporary folder.
    assert sorted(tmp_path.iterdir()) == [alone]
    # Started in an export that stays, lm-eval leaves it as it is.
    for expected in (False, True):
        done = pretrain("evaluate", run, "--harness", "pretrain_validation")
        assert done.code == 0 and (not expected or "made earlier" in done.out), done.text


@needs_lm_eval
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.torture),
        pytest.param(signal.SIGKILL, marks=pytest.mark.torture),
    ],
)
def test_lm_eval_ends_with_the_command(run, tmp_path, number):
    """The task's own code writes its process id and sleeps, so lm-eval runs until it is ended."""
    pid = tmp_path / "pid"
    code = "import os, time\nfrom pathlib import Path\n"
    code += f"Path('{pid}.new').write_text(str(os.getpid()))\nos.rename('{pid}.new', '{pid}')\n"
    (tmp_path / "slow.py").write_text(code + "time.sleep(600)\ntext = str\n")
    task = TASK.format(name="slow", text="slow.jsonl").replace('""', "!function slow.text")
    (tmp_path / "slow.yaml").write_text(task)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    alone = tmp_path / "alone"
    shutil.copytree(run / "checkpoints/step-00000008", alone)
    words = ["evaluate", str(alone), "--harness", str(tmp_path / "slow.yaml")]
    process = started([*PRETRAIN, *words], {"TMPDIR": str(temporary)})
    wait_for(lambda: pid.exists() or process.poll() is not None)
    assert process.poll() is None, ended(process).text
    child = int(pid.read_text())
    process.send_signal(number)
    done = ended(process)
    assert done.code == (130 if number == signal.SIGINT else -number), done.text
    wait_for(lambda: not is_alive(child))
    # Neither the export of a checkpoint without a run nor lm-eval's files are left.
    assert number == signal.SIGKILL or not any(temporary.glob("pretrain-*")), done.text


@needs_lm_eval
def test_what_lm_eval_says_of_a_task_that_cannot_work_is_shown(run, tasks, tmp_path):
    (tmp_path / "gone.yaml").write_text(TASK.format(name="gone", text="gone.jsonl"))
    done = pretrain("evaluate", run, "--harness", tmp_path / "gone.yaml")
    explained(done, 1, "gone.yaml: lm-eval failed", "gone.jsonl")
    explained(pretrain("evaluate", run, "--harness", "no_such_task"), 1, "no_such_task")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--harness", "gone.yaml"], ["gone.yaml: no such file"]),
        (["--harness", "README.md"], ["README.md: lm-eval reads tasks from files named *.yaml"]),
        (["--harness", "configs"], ["configs: the folder holds no task"]),
        (["--harness", "x", "--text", "README.md"], ["--text: with --harness"]),
        (["--harness", "x", "--stride", "4"], ["--stride: with --harness"]),
        (["--harness", "x", "--max-tokens", "400"], ["--max-tokens: with --harness"]),
        (["--harness", "x", "--protocols", "sliding"], ["--protocols: with --harness"]),
        (["--harness", "x", "--set", "model.num_layers=3"], ["model.num_layers", "data.directory"]),
        (["--harness", "x", "--out", "README.md"], ["README.md: the file name must end in .json"]),
        (["--harness", "x", "--lengths", f"{2**40}"], ["--max-length"]),
    ],
)
def test_wrong_options_are_refused(refused, run, options, words):
    refused(["evaluate", run, *options], *words)


def test_a_model_without_a_class_is_refused_before_anything_is_written(refused, workspace, config):
    other = workspace / "runs/t5"
    settings = sets(f"run.directory={other}", "position.method=t5", "train.num_steps=1")
    succeeds("train", config, *settings)
    refused(
        ["evaluate", workspace / "runs/alibi", other, "--harness", "x"], "position.method", "t5"
    )


def test_results_replace_results_alone(refused, run, tmp_path):
    for name, content in (("a.json", "{}"), ("curve.json", '{"records": []}')):
        (tmp_path / name).write_text(content)
        refused(["evaluate", run, "--harness", "x", "--out", tmp_path / name], "already exists")


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-eval is installed")
def test_without_lm_eval_one_line_says_how_to_install_it(refused, run):
    refused(["evaluate", run, "--harness", "x"], "pip install 'pretrain[lm-eval]'")
