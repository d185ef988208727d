"""Check site files: what a site may contain, and which error message refuses what it may not."""

import sys

import pytest
import tomli_w

from pretrain.config import ConfigError
from pretrain.launcher.site import Site, load_site, parse_site
from pretrain.launcher.slurm_job import seconds_of, share_of_memory
from tests.changed import ROOT

CPU = {"name": "here", "nodes": 2, "tasks_per_node": 4, "cpus_per_node": 8}
GPU = {
    "name": "there",
    "nodes": 4,
    "gpus_per_node": 8,
    "cpus_per_node": 40,
    "gpu": "V100",
    "precisions": ["fp32", "fp16"],
}


def test_the_examples_are_sites():
    v100, h100 = (load_site(ROOT / f"slurm/site.{name}.toml") for name in ("v100", "h100"))
    assert (v100.nodes * v100.max_tasks_per_node, v100.precisions) == (128, ("fp32", "fp16"))
    assert "bf16" in h100.precisions and h100.ranks_python == "python3"


def test_a_site_without_gpus_says_its_ranks():
    site = parse_site(CPU, "site.toml")
    assert (site.max_tasks_per_node, site.precisions, site.ranks_python) == (
        4,
        ("fp32",),
        sys.executable,
    )


REFUSED = [
    (CPU | {"node": 2}, ["site.toml: node: no such key", "nodes,"]),
    ({k: v for k, v in CPU.items() if k != "nodes"}, ["nodes: missing"]),
    ({k: v for k, v in CPU.items() if k != "tasks_per_node"}, ["gpus_per_node: missing"]),
    (GPU | {"tasks_per_node": 4}, ["tasks_per_node = 4", "gpus_per_node = 8", "Leave it out"]),
    (GPU | {"cpus_per_node": 7}, ["cpus_per_node = 7", "8 ranks"]),
    (GPU | {"gpu_type": "v100:8,a"}, ["gpu_type: ", "match pattern"]),
    (GPU | {"time_limit": "tomorrow"}, ["time limit 'tomorrow'", "12:00:00"]),
    (GPU | {"memory_per_node": "lots"}, ["memory_per_node = 'lots'", '"480G"']),
    (GPU | {"partition": "a\nb"}, ["partition = 'a\\nb'", "control characters"]),
    (GPU | {"account": ""}, ["account = ''", "is empty"]),
    (GPU | {"modules": ["cuda\0"]}, ["modules = 'cuda\\x00'"]),
    (GPU | {"srun_arguments": ["--container-env=MY_TOKEN=0"]}, ["MY_TOKEN looks like a secret"]),
    (GPU | {"environment": {"A B": "1"}}, ["environment.A B", "not a variable's name"]),
    (GPU | {"sbatch_arguments": ["--wr=touch x"]}, ["'--wr=touch x'", "sets this option itself"]),
    (GPU | {"srun_arguments": ["--nodes=2"]}, ["srun_arguments: '--nodes=2'", "sets this option"]),
    (GPU | {"sbatch_arguments": ["$(touch x)"]}, ["'$(touch x)'", "not an option"]),
    (GPU | {"environment": {"BASH_ENV": "x"}}, ["environment.BASH_ENV"]),
    (GPU | {"environment": {"RANK": "0"}}, ["environment.RANK", "set this themselves"]),
]


@pytest.mark.parametrize(("values", "says"), REFUSED)
def test_a_wrong_site_is_refused_by_name(values, says):
    with pytest.raises(ConfigError) as error:
        parse_site(values, "site.toml")
    assert all(words in str(error.value) for words in ["site.toml: ", *says]), str(error.value)


def test_a_file_is_read_and_named_in_errors(tmp_path):
    path = tmp_path / "my site.toml"
    path.write_text(tomli_w.dumps(GPU | {"environment": {"A": "$(x) '\n"}}))
    site = load_site(path)
    assert isinstance(site, Site) and site.environment == {"A": "$(x) '\n"}
    path.write_text(tomli_w.dumps(GPU), "utf-8-sig", newline="\r\n")
    assert load_site(path).partition == site.partition
    path.write_text(tomli_w.dumps(GPU), "utf-16")
    with pytest.raises(ConfigError, match=r"site\.toml: .*can't decode byte 0xff"):
        load_site(path)
    path.write_text("nodes = ")
    for wrong, says in (
        (path, "not a readable site file"),
        (tmp_path / "none", "no such site file. `pretrain config --list` shows"),
        (tmp_path, "not a readable"),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            load_site(wrong)
        assert str(wrong) in str(error.value)


# The formats that sbatch(1) lists for --time, and their seconds, worked out by hand.
TIMES = {
    "90": 5400,
    "1:30": 90,
    "2:00:00": 7200,
    "1-00": 86400,
    "1-12:30": 131400,
    "2-01:02:03": 176523,
    "UNLIMITED": None,
}


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_times_are_slurms(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0:00", "-5", "1h", "1:2:3:4", "1-", "٣", "90\n", "90 --wrap=x"]
)
def test_other_times_are_refused(text):
    with pytest.raises(ConfigError, match="time limit"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("memory", "tasks", "share"),
    [
        ("480G", 8, "480G"),
        ("480G", 1, "61440M"),
        ("0", 1, "0"),
        ("1000", 4, "500M"),
        ("1T", 2, "262144M"),
        ("512MB", 8, "512M"),
        ("100K", 1, "1M"),
    ],
)
def test_a_part_of_a_node_takes_its_part_of_the_memory(memory, tasks, share):
    assert share_of_memory(memory, tasks, 8) == share
