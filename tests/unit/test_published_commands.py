"""What commands, example sites, configs and pages say of the published 1.3B runs is the same."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from pretrain.cli.commands import app as pretrain
from pretrain.config import ConfigError, load_config, num_parameters
from pretrain.launcher.cli import app as launcher
from pretrain.launcher.site import Site, load_site
from pretrain.plan.memory import memory_of_rank, stages_of

ROOT = Path(__file__).parents[2]
RUN = "configs/cc100_roberta/alibi_1024.toml"
RUNS = [
    f"configs/cc100_roberta/{folder}{method}_{length}.toml"
    for folder in ("", "h100/")
    for method in ("alibi", "sinusoidal")
    for length in (512, 1024, 2048)
]
# A plan takes 2 s of a core. test_config_families.py says that the others differ in length alone.
PLANNED = [
    pytest.param(run, marks=[] if "1024" in run else pytest.mark.torture, id=run) for run in RUNS
]
GUIDE = " ".join((ROOT / "docs/guide.md").read_text().split())
SHAPE = (
    r"tensor (\d+) x pipeline (\d+) x data (\d+), (\d+) micro batches of (\d+) a step, ZeRO (\d)"
)


@pytest.fixture(autouse=True)
def _in_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)


def site_of(run: str) -> Path:
    """Return the example site that the guide names for a folder of configs."""
    sites = re.findall(r"`(site\.\w+\.toml)` for [a-z -]* in `([\w/]+)`", GUIDE)
    [name] = [name for name, folder in sites if folder == str(Path(run).parent)]
    return ROOT / "slurm" / name


@functools.cache
def say(command: str, run: str) -> str:
    """Return what a command prints of a run, as the guide calls it."""
    options = {
        "config": (),
        "plan": ("--gpus", "128", "--gpu-type", "h100" if "h100" in run else "v100-32"),
        "submit": ("--site", str(site_of(run)), "--dry-run"),
    }
    app = launcher if command == "submit" else pretrain
    result = CliRunner().invoke(app, [command, run, *options[command]], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def found(pattern: str, text: str) -> tuple[str, ...]:
    """Return the groups of a pattern, which is in a text once."""
    [groups] = re.findall(pattern, text, re.MULTILINE)
    return cast(tuple[str, ...], groups)


def checked_site(run: str) -> Site:
    """Return the site of a run, whose nodes and GPUs are those that the guide says."""
    site = load_site(site_of(run))
    assert f"{site.nodes} nodes of {site.gpus_per_node} GPUs that these runs need" in GUIDE
    assert f"1.3B on {site.nodes * site.gpus_per_node} GPUs" in GUIDE
    return site


@pytest.mark.parametrize("run", RUNS)
def test_the_first_line_of_a_config_is_what_pretrain_config_and_the_site_say(run):
    words = found(
        r"\A# (ALiBi|Sinusoidal) ?\w*, (1\.3)B parameters, trained at (\d+) tokens, (\d+) (\w100)s"
        r"(?: or H200s)?, (\w+)\.",
        (ROOT / run).read_text(),
    )
    method, billions, length, ranks, gpu, precision = words
    text, site = say("config", run), checked_site(run)
    assert num_parameters(load_config(run)) // 10**8 == float(billions) * 10
    assert f"{method.lower()}, trained at {length} tokens" in text
    assert f'precision = "{precision}"' in text and precision in site.precisions
    assert f"# layout           {ranks} processes = " in text
    assert int(ranks) == site.nodes * site.gpus_per_node and str(site.gpu).startswith(gpu)


@pytest.mark.parametrize("run", PLANNED)
def test_config_plan_and_job_are_of_one_shape(run):
    config, plan, job, site = say("config", run), say("plan", run), say("submit", run), site_of(run)
    ranks, *shape = found(rf"^# layout +(\d+) processes = {SHAPE}", config)
    tensor, pipeline, data, _, size, zero = shape
    nodes, of_a_node, *sent = found(rf"^# (\d+) nodes x (\d+) ranks = {SHAPE}", job)
    assert sent == shape and int(nodes) * int(of_a_node) == int(ranks)
    assert f"srun --nodes={nodes} --ntasks-per-node={of_a_node} " in job
    assert f" --ntasks={ranks} " in job and load_site(site).nodes == int(nodes)
    planned = rf"TP {tensor} PP {pipeline} DP {data} ZeRO {zero}, micro batches of {size}"
    assert f"As configured ({planned}): " in plan
    # What the run is, in the words of both.
    steps, tokens, total = found(
        r"^# training +([\d,]+) steps of ([\d,]+) tokens = ([\d,]+)", config
    )
    method, length = found(r"^# positions +(\w+), trained at (\d+) tokens", config)
    [precision] = re.findall(r'^precision = "(\w+)"', config, re.MULTILINE)
    [parameters] = re.findall(r"^# parameters +([\d,]+) ", config, re.MULTILINE)
    assert plan.startswith(
        f"{parameters} parameters, {method}, L = {length}, {precision}; {tokens} tokens a step, "
        f"{steps} steps, {total} tokens\n{ranks} x "
    )
    # It fits into the GPUs of the site: on V100s into half of one, as the config says.
    [own] = re.findall(r"^as configured .* ([\d.]+)$", plan, re.MULTILINE)
    gpu, capacity = found(r"^(\w+) (\d+) GB$", str(load_site(site).gpu))
    assert re.search(rf"^{ranks} x [\w -]*{gpu}", plan, re.MULTILINE)
    assert float(own) < int(capacity) / 2
    assert "less than half of a 32 GB V100" in (ROOT / RUN).with_name("base.toml").read_text()


@pytest.mark.parametrize("run", RUNS)
def test_the_export_is_that_of_the_readme(run):
    """Class and precisions, as `pretrain config` prints them; the config leaves them to it."""
    exports = re.findall(r"^# export +(.*)$", say("config", run), re.MULTILINE)
    positions = "ALiBi" if "alibi" in run else "sinusoidal"
    name = {"ALiBi": "Bloom", "sinusoidal": "OPT"}[positions]
    [bits] = re.findall(
        rf"^\| {positions} \| {name} \| (.*?) \|",
        (ROOT / "docs/huggingface.md").read_text(),
        re.MULTILINE,
    )
    if bits == "bf16, fp16":
        assert exports[0].startswith(f"{name}ForCausalLM in fp32, bf16 and fp16, ")
    else:
        assert exports[0].startswith(f"{name}ForCausalLM in fp32, for up to ")
        [option] = re.findall("`(.*)`", bits)
        assert "In bf16 and fp16 stock transformers rounds" in exports[0] and option in exports[0]
    base = (ROOT / RUN).with_name("base.toml").read_text()
    assert "the ALiBi models export as Bloom" in base and "vLLM" not in base


def test_the_numbers_of_the_pages_are_those_of_the_plan_and_the_config():
    config = load_config(RUN)
    for text in (
        f"{round(config.planned_tokens / 1e9)} billion tokens",
        f"{config.train.num_steps:,} of {config.tokens_per_step / 1e6:.1f} million tokens",
        f"{2 * config.planned_tokens / 1e9:.0f} GB, 2 bytes each",
        # fp32 masters and two moments; the weights in 16 bit are made from the masters.
        f"{12 * num_parameters(config) / 1e9:.0f} GB, of which `checkpoint.keep` = "
        f"{config.checkpoint.keep} stay",
    ):
        assert text in GUIDE
    page = (ROOT / "docs/v100.md").read_text()
    rows = re.findall(r"^\| .*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    columns = []
    for sequences in (1, 2, 4, 8):
        config = load_config(RUN, [f"batch.micro_batch_size={sequences}"])
        layout = config.layout(128)
        memory = memory_of_rank(config, layout, stages_of(config, layout)[0], is_modern=False)
        parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations]
        parts += [memory.logits, memory.buffers, memory.overhead, memory.total]
        columns.append([f"{part / 1e9:.1f}" for part in parts])
    assert rows == list(zip(*columns))


@pytest.mark.parametrize(("key", "value"), [("paths", '["a.txt"]'), ("text_field", '"body"')])
def test_a_key_of_one_corpus_is_refused_with_what_to_write_instead(tmp_path, key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(RUN, [f"data.{key}={value}"])
    message = str(caught.value)
    assert (
        f"Set {key} in the table [data.corpora.NAME] of a file instead, where NAME is " in message
    )
    assert message.endswith(
        " cc_news, openwebtext, stories or a further corpus; or remove data.corpora"
    )
    own, base = tmp_path / "own.toml", f'base = "{ROOT / RUN}"\n'
    own.write_text(f"{base}[data.corpora.cc_news]\n{key} = {value}\n")
    load_config(own)
    own.write_text(
        f'{base}remove = ["data.corpora"]\n[data]\nsource = "jsonl"\npaths = ["b.txt"]\n'
    )
    load_config(own, [f"data.{key}={value}"])
    comments = " ".join((ROOT / RUN).with_name("base.toml").read_text().split("\n# "))
    assert "set `paths` in each [data.corpora.NAME] to yours" in comments
