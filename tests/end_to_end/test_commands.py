"""The whole workflow as a user runs it: every command on a tiny run, under every launcher."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

from pretrain.config import dump_config, load_config
from pretrain.evaluation.records import FIELDS
from tests.end_to_end.commands import (
    LAUNCHER,
    PRETRAIN,
    TORCHRUN,
    Running,
    contents,
    explained,
    forked,
    fresh,
    losses,
    metrics,
    pretrain,
    ranks,
    running_ranks,
    sets,
    succeeded,
    succeeds,
    untimed,
    wait_for,
)
from tests.unit.test_rundir import undocumented

STEPS = 120
STEP_RECORD = {"step", "loss_nats", "gradient_norm", "learning_rate", "tokens_per_second"}
EVALUATION_RECORD = {"step", "evaluation", "length", "protocol", "loss_nats", "perplexity"}
SETTINGS = [
    f"train.num_steps={STEPS}",
    "checkpoint.interval_steps=20",
    "checkpoint.keep=2",
    "evaluation.interval_steps=60",
    "logging.interval_steps=30",
]


def launch(config: Path, directory: Path, *changes: str) -> list[str]:
    """Return the command line that trains the run of these tests in `directory`."""
    settings = sets(*SETTINGS, f"run.directory={directory}", *changes)
    return [*LAUNCHER, "local", str(config), "--nproc", "2", *settings]


@pytest.fixture(scope="module")
def whole(workspace: Path, config: Path) -> tuple[Path, str]:
    """(an uninterrupted run of 120 steps on two processes, its stderr).

    Its config builds on another file. Both are gone afterwards, as nothing needs them again.
    """
    directory = workspace / "runs/whole"
    base, overlay = workspace / "bases/base.toml", workspace / "overlay.toml"
    base.parent.mkdir()
    base.write_text(config.read_text())
    overlay.write_text('base = "bases/base.toml"\n')
    done = succeeded(forked(launch(overlay, directory)))
    overlay.unlink()
    base.unlink()
    return directory, done.err


@pytest.fixture(scope="module")
def exported(workspace: Path, whole) -> tuple[Path, str]:
    """(the run as a Hugging Face folder, the stdout of the export)."""
    done = pretrain("export", whole[0], workspace / "hf")
    assert done.code == 0 and done.err == "", done.text
    return workspace / "hf", done.out


def running(directory: Path) -> list[int]:
    """Return the ids of processes whose command line contains `directory`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            # The process has ended.
            continue
    return found


# ---- a run ---------------------------------------------------------------------------------------
def test_what_a_run_leaves(config, whole):
    directory, _ = whole
    names = {p.name for p in directory.iterdir()}
    files = {"run.json", "config.toml", "metrics.jsonl"}
    assert names == {*files, "attempts", "checkpoints", "logs"}
    assert undocumented(directory) == []
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [
        "step-00000100",
        "step-00000120",
    ]
    terminal, other = ((directory / f"logs/rank-{rank}.log").read_text() for rank in range(2))
    assert whole[1].startswith(terminal.partition("\n")[2]) and "step 120/120" in terminal
    assert re.fullmatch(r"--- attempt 1, [-\d]+ [:\d]+ ---\n", other)
    resolved = load_config(config, [*SETTINGS, f"run.directory={directory}"])
    assert load_config(directory / "config.toml") == resolved
    assert (directory / "config.toml").read_text() == dump_config(resolved)


def test_the_numbers_of_a_run(whole):
    records = metrics(whole[0])
    steps = [r for r in records if "evaluation" not in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert all(r.keys() >= STEP_RECORD for r in steps)
    assert all(math.isfinite(r[name]) and r[name] > 0 for r in steps for name in STEP_RECORD)
    # Before the first update logits have a variance of 1, and a word's own one is larger, because
    # the embedding is the output layer too.
    assert 0 < steps[0]["loss_nats"] - math.log(512) < 1
    assert steps[-1]["loss_nats"] < steps[0]["loss_nats"] - 1
    evaluations = [r for r in records if "evaluation" in r]
    assert [(r["step"], r["length"]) for r in evaluations] == [
        (s, n) for s in (60, 120) for n in (32, 64)
    ]
    for r in evaluations:
        assert r.keys() >= EVALUATION_RECORD
        assert r["evaluation"] is True and r["protocol"] == "nonoverlapping"
        assert r["perplexity"] == pytest.approx(math.exp(r["loss_nats"]))


def test_what_a_run_says_in_a_log(whole):
    """Plain lines: no progress bar, no escape codes, no output of the libraries."""
    directory, said = whole
    lines = said.splitlines()
    assert lines[0] == f"{directory}: from scratch, to step 120; tensor 1 x pipeline 1 x data 2"
    assert sum(line.startswith("step ") for line in lines) == 5
    assert lines[3].startswith("the loss begins above ln(")
    assert len(lines) == 2 + 5 + 1 + 2 + 2
    assert all(map(str.isprintable, lines))


def test_ctrl_c_and_the_same_command_again(workspace, config, whole):
    """A run interrupted in the middle saves and exits with code 80; what it prints resumes it.

    Its metrics are then those of the uninterrupted run.
    """
    directory = workspace / "runs/interrupted"
    written = directory / "metrics.jsonl"
    process = Running(launch(config, directory))

    def halfway() -> bool:
        """Return True well after the first checkpoint, at step 20, or when the run has ended."""
        if process.poll() is not None:
            return True
        return written.exists() and written.read_text().count("\n") > 25

    try:
        wait_for(halfway)
    finally:
        process.press_ctrl_c()
    done = process.ended()
    assert done.code == 80 and done.out == "", done.text
    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    saved = int(newest.name.removeprefix("step-"))
    assert 25 <= saved < STEPS
    answer = "saving, then stopping; press Ctrl-C again to leave at once, losing"
    *_, goes_on, command = done.err.splitlines()
    answer = rf"^{answer} \d+ steps since (step-\d+|the start)$"
    assert re.search(answer, done.err, re.MULTILINE), done.err
    assert goes_on == f"{directory}: {newest.name} is saved; go on with:"
    logs = [(directory / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert "Traceback" not in done.err + logs[1]
    assert all(line in done.err for line in logs[0].splitlines()[1:]), logs[0]
    assert running(directory) == []

    words = shlex.split(command)
    assert words[0] == "launcher" and "--resume" not in words
    again = succeeded(forked([*LAUNCHER, *words[1:]]))
    resumed = f"{directory}: going on from step {saved}, to step 120"
    assert again.err.splitlines()[0] == f"{resumed}; tensor 1 x pipeline 1 x data 2"
    # Each step once, and every number bit for bit.
    assert untimed(directory) == untimed(whole[0])
    assert not list((directory / "checkpoints").glob(".*"))


def test_a_start_with_nothing_to_do_or_a_mistake_leaves_no_trace(workspace, config, whole):
    directory = whole[0]
    before = contents(directory)
    done = forked(launch(config, directory))
    assert done.code == 0 and done.out == "", done.text
    words = f"{directory}: finished already, at step 120; nothing to do. To train it further"
    assert done.err.startswith(words) and len(done.err.splitlines()) == 1
    for setting, says in (
        ("optimizer.learning_rate=2e-3", "was trained with"),
        ("train.num_steps=90", "has done 120 steps already"),
        ("model.num_layers=4", "was trained with"),
    ):
        explained(forked(launch(config, directory, setting)), 2, says)
    explained(
        forked(launch(config, workspace / "runs/new", "data.directory=nowhere")),
        2,
        "data.directory = nowhere: no built data set",
    )
    assert contents(directory) == before and not (workspace / "runs/new").exists()


# ---- evaluation ----------------------------------------------------------------------------------
EVALUATE = [
    "--lengths",
    "32,64,128",
    "--protocols",
    "nonoverlapping,sliding",
    "--stride",
    "16",
    "--max-tokens",
    "1000",
]


def test_evaluate(tmp_path, whole):
    """One process evaluates a run's newest checkpoint; two evaluate both, with the same numbers."""
    directory, _ = whole
    newest = directory / "checkpoints/step-00000120"
    earlier = directory / "checkpoints/step-00000100"
    done = pretrain("evaluate", directory, *EVALUATE, "--out", tmp_path / "one/curve.json")
    assert done.code == 0 and done.err == "", done.text
    names = {p.name for p in (tmp_path / "one").iterdir()}
    assert names >= {"curve.json", "curve.png", "report.md"}
    curve = json.loads((tmp_path / "one/curve.json").read_text())
    asked = [(p, n) for p in ("nonoverlapping", "sliding") for n in (32, 64, 128)]
    assert [(r["protocol"], r["length"]) for r in curve["records"]] == asked
    for r in curve["records"]:
        assert (r["method"], r["tokens"], r["checkpoint"]) == ("alibi", 1000, str(newest))
        assert r["stride"] == (16 if r["protocol"] == "sliding" else r["length"])
        assert r["perplexity"] == pytest.approx(math.exp(r["loss_nats"]))
        assert f"{r['perplexity']:.2f}" in done.out
    table = done.out[done.out.index("Perplexity by length") :].splitlines()
    assert table[0].endswith("(training length L = 32)")
    assert table[1].split("  ")[-1].strip() == "128 = 4 L"

    sources = ["evaluate", str(newest), str(earlier)]
    with running_ranks([*sources, *EVALUATE, "--out", tmp_path / "two/curve.json"], 2) as group:
        two = [succeeded(done) for done in group.done()]
    assert [done.out.count("Perplexity by length") for done in two] == [1, 0]
    records = json.loads((tmp_path / "two/curve.json").read_text())["records"]
    assert [r["checkpoint"] for r in records] == [str(newest)] * 6 + [str(earlier)] * 6
    measured = {"loss_nats", "perplexity", "loss_low", "loss_high", "bits_per_byte"}
    for one, other in zip(curve["records"], records):
        # fp64 sums of the same fp32 losses in another order. Batches of another shape may also
        # round the losses themselves differently.
        assert all(other[k] == pytest.approx(one[k], rel=1e-6) for k in measured)
        exact = set(FIELDS) - measured
        assert {k: other[k] for k in exact} == {k: one[k] for k in exact}
    assert records[6]["loss_nats"] != records[0]["loss_nats"]


# ---- export --------------------------------------------------------------------------------------
def test_export(whole, exported):
    folder, said = exported
    lines = said.splitlines()
    assert lines[0] == f"{whole[0]}/checkpoints/step-00000120 -> {folder} (MptForCausalLM)"
    assert lines[-1] == "MptForCausalLM computes the same function"
    assert [line.split()[0] for line in lines[4:-1]] == ["fp32"] * 2 + ["bf16"] * 2 + [
        "fp16"
    ] * 2 + ["fp32:", "bf16:", "fp16:"]
    assert all(line.endswith(": yes") for line in lines[-4:-1])
    names = {p.name for p in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "README.md"}
    last = [r for r in metrics(whole[0]) if "evaluation" in r and r["step"] == STEPS]
    assert all(f"{r['perplexity']:.2f}" in (folder / "README.md").read_text() for r in last)


STOCK = """
import sys, torch
import transformers.integrations.hub_kernels
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = tokenizer("To be, or not to be", return_tensors="pt", add_special_tokens=False)
generated = model.generate(**prompt, max_new_tokens=8, do_sample=False)
text = tokenizer.decode(prompt.input_ids[0])
new_tokens = generated.shape[1] - prompt.input_ids.shape[1]
print(type(model).__name__, text == "To be, or not to be", new_tokens)
print("pretrain" in sys.modules)
"""


def test_the_export_needs_nothing_of_ours(exported):
    """Stock transformers loads it in a process that imports no module of this project.

    The process starts in the clone, whose folder kernels/ must not be taken for Hugging Face's.
    """
    command = [PRETRAIN[0], "-W", "ignore", "-c", STOCK, str(exported[0])]
    done = succeeded(fresh(command, {"HF_HUB_OFFLINE": "1"}))
    assert done.out.splitlines() == ["MptForCausalLM True 8", "False"], done.text


def test_reach_of_a_run_is_what_stock_attention_shows_of_its_export(whole, exported, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 20)
    found = []
    for source in (whole[0], exported[0]):
        out = tmp_path / f"{source.name}.json"
        words = ["--text", tmp_path / "text.txt", "--length", "256", "--out", out]
        done = pretrain("reach", source, *words, "--plot", tmp_path / f"{source.name}.png")
        assert done.code == 0, done.text
        found.append(json.loads(out.read_text()))
        assert f"{found[-1]['linear_from']['certificate']:,.0f}\n" in done.out
    run, imported = found
    assert run == imported and run["windows"] == 1 and run["length"] == 256
    assert (tmp_path / "hf.png").stat().st_size > 10_000

    tokenizer = AutoTokenizer.from_pretrained(exported[0])
    ids = tokenizer((tmp_path / "text.txt").read_text(), add_special_tokens=False).input_ids[:256]
    model = AutoModelForCausalLM.from_pretrained(exported[0], attn_implementation="eager")
    seen = model(torch.tensor([ids]), output_attentions=True, use_cache=True)
    weights, cache = seen.attentions, sum(x.nbytes for kv in seen.past_key_values for x in kv[:2])
    assert run["cache_bytes"]["all"] == {str(32 * n): 32 * n * cache / 256 for n in (16, 128, 1024)}
    distance = torch.arange(256)[:, None] - torch.arange(256)
    for layer, of_layer in enumerate(weights):
        for head, of_head in enumerate(of_layer[0].double()):
            worst = [of_head.where(distance > d, 0).sum(1).max().item() for d in range(256)]
            # Stock attention rounds to fp32: one token more or less.
            expected = sum(mass >= 2.0**-24 for mass in worst)
            measured = run["seen"]["measured"][layer][head]
            assert abs(measured - expected) <= 1
            assert measured <= run["seen"]["farthest"][layer][head] + 1
            assert measured <= run["certificate"][layer][head]


# ---- other launchers, other commands -------------------------------------------------------------
def test_every_launcher_gives_the_same_run(workspace, config, whole):
    """torchrun, srun and a single process give the losses of `launcher local`.

    A run that one launcher has started can be resumed under another.
    """
    expected = losses(whole[0])[:8]

    def arguments(name: str) -> list[str]:
        return ["train", str(config), *sets(f"run.directory={workspace}/runs/{name}")]

    on_two = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "pretrain"]
    succeeded(forked([*on_two, *arguments("torchrun")]))
    assert losses(workspace / "runs/torchrun") == expected

    job = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "gpu[003-004]",
        "MASTER_ADDR": "127.0.0.1",
        "PRETRAIN_RENDEZVOUS": str(workspace),
        # DeepSpeed and Megatron would refuse these values.
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "NVTE_FUSED_ATTN": "0",
    }
    tasks = ranks(arguments("srun"), [job | {"SLURM_PROCID": r, "SLURM_LOCALID": r} for r in "01"])
    assert [task.code for task in tasks] == [0, 0], tasks
    assert "from scratch, to step 8; tensor 1 x pipeline 1 x data 2" in tasks[0].err
    assert tasks[1].text == ""
    assert losses(workspace / "runs/srun") == expected

    alone = pretrain(*arguments("alone"))
    assert alone.code == 0 and "tensor 1 x pipeline 1 x data 1" in alone.err, alone.text
    # The same samples in the same steps; sums over the batch in another order.
    assert losses(workspace / "runs/alone") == pytest.approx(expected, rel=1e-5)

    on = succeeds(*arguments("srun"), *sets("train.num_steps=10"))
    assert "going on from step 8, to step 10; tensor 1 x pipeline 1 x data 1" in on.err, on.text
    assert losses(workspace / "runs/srun") == pytest.approx(losses(whole[0])[:10], rel=1e-5)


def test_bench(workspace, config):
    before = set(workspace.rglob("*"))
    done = pretrain("bench", "train", config, "--steps", "3")
    assert done.code == 0 and done.err == "", done.text
    lines = done.out.splitlines()
    assert re.fullmatch(
        r"[\d,]+ parameters, alibi, L = 32, fp32, 1 x cpu; medians of 3 steps", lines[0]
    )
    rows = {
        m[1]: float(m[2].replace(",", ""))
        for line in lines[1:]
        if (m := re.match(r"(.+?) {2,}([\d,.]+)", line))
    }
    parts = ["data", "forward and backward", "gradient reduction", "optimizer step"]
    assert rows.keys() >= {"tokens/s", "step", "peak memory", *parts}
    # 8 sequences of 32 tokens; times are printed in milliseconds with two decimals.
    assert rows["tokens/s"] == pytest.approx(8 * 32 / (rows["step"] / 1e3), rel=0.01)
    # The medians of the parts need not add up to the median of the whole.
    assert 0 < sum(rows[part] for part in parts) < 1.5 * rows["step"]
    assert set(workspace.rglob("*")) == before


def test_config_prints_what_loads_again(tmp_path, config):
    done = fresh([*PRETRAIN, "config", str(config), "--set", "model.num_layers=3"])
    assert done.code == 0 and done.err == "", done.text
    (tmp_path / "resolved.toml").write_text(done.out)
    assert load_config(tmp_path / "resolved.toml") == load_config(config, ["model.num_layers=3"])
    # 512 x 32 embeddings, 3 layers of 12 h^2 + 2 h, the final LayerNorm, and no biases
    assert f"{512 * 32 + 3 * (12 * 32**2 + 2 * 32) + 32:,}" in done.out


CALLS = """
import gc, sys
import pretrain, torch
torch.set_default_dtype(torch.float64)
config = pretrain.load_config(sys.argv[1], sys.argv[2:])
pretrain.build_data(config)
result = pretrain.train(config)
gc.collect()
left = sum(isinstance(x, torch.nn.Parameter) for x in gc.get_objects())
hf = pretrain.export_model(result.directory, result.directory / "hf")
imported = pretrain.import_model(hf, result.directory.with_name("imported"))
[record, *_] = pretrain.evaluate(result.directory, protocols="nonoverlapping")
print("measured", record["perplexity"], left, hf.is_dir(), imported.model.num_layers)
try:
    pretrain.export_model(result.directory, hf)
except pretrain.ConfigError as error:
    print("refused", error)
"""


def test_ranks_call_the_library_one_function_after_another(workspace, config, whole):
    """Each call joins the processes anew, at a store that the call before has used.

    What needs one process is done by the first one, and the others wait.
    """
    run, words = workspace / "runs/calls", ["--standalone", "--nproc-per-node", "2", "-m"]
    # The ranks are forked, as those of a module of ours are.
    (workspace / "pretrain_calls.py").write_text(CALLS)
    settings = config, f"run.directory={run}", "train.num_steps=2"
    done = succeeded(forked([*TORCHRUN, *words, "pretrain_calls", *settings], cwd=workspace))
    [first, second] = re.findall(r"measured (\S+) 0 True 2", done.out)
    assert len(re.findall(f"refused .*{run}/hf", done.out)) == 2, done.out
    succeeds("evaluate", run, "--protocols", "nonoverlapping", "--out", workspace / "calls.json")
    [record, *_] = json.loads((workspace / "calls.json").read_text())["records"]
    assert first == second and float(first) == pytest.approx(record["perplexity"], rel=1e-5)
    assert losses(run) == pytest.approx(losses(whole[0])[:2], rel=1e-5)
