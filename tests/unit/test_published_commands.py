"""What commands, example sites, configs and pages say of the published 1.3B runs is the same."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from pretrain.cli.commands import app as pretrain
from pretrain.launcher.cli import app as launcher
from pretrain.launcher.site import load_site

ROOT = Path(__file__).parents[2]
RUN = "configs/cc100_roberta/alibi_1024.toml"
RUNS = [
    f"configs/cc100_roberta/{folder}{method}_{length}.toml"
    for folder in ("", "h100/")
    for method in ("alibi", "sinusoidal")
    for length in (512, 1024, 2048)
]
# A plan takes 2 s of a core. test_config_families.py says that the others differ in their method
# and length alone.
PLANNED = [
    pytest.param(run, marks=[] if run == RUN else pytest.mark.torture, id=run) for run in RUNS
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
