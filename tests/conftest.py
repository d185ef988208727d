"""Say where and in which order tests run; share a tiny data set, a small config and the layouts.

`make test` runs all folders at once in four pytest-xdist processes (`--dist loadgroup`), which take
one group of tests after another, in the order of `Group.place`:

- The first process has Slurm's tests, which wait for Slurm's clocks nearly all the time.
- The second has the tests whose ranks keep two cores busy whenever they all compute.
- The others begin with the tests of tests/unit that have deadlines. Then they compute, file by
  file, the short ones last.

So two cores have work all the time. What waits has deadlines and keeps its priority; the processes
that compute give theirs up, with all that they start.
"""

from __future__ import annotations

import copy
import fcntl
import os
import signal
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pretrain.config import RunConfig, load_config, parse_config

warnings.simplefilter("ignore")
# As many processes compute as there are cores.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter. Triton reads this variable when it is
    # first imported, which any library may do, so it is set before everything else.
    os.environ["TRITON_INTERPRET"] = "1"
# A non-interactive shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP.
# Child processes inherit this, and the tests that send signals to processes they start would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Group(NamedTuple):
    """Tests that stay in one process, because they share dear fixtures or deadlines."""

    name: str
    place: int
    """Groups with lower places are handed out first."""
    waits: bool
    """Mostly waits for clocks and deadlines. What does not, computes all the time."""


DEADLINES = {
    f"test_{name}"
    for name in (
        "attempts",
        "launcher_local",
        "local_sweep",
        "preflight",
        "rendezvous",
        "reporter",
        "srun",
        "supervise",
    )
}
"""Files of tests/unit in which a process that gets no core for a second counts as hung."""
COMPUTING = ("end_to_end", "kernels", "unit")
"""Folders of which each file is a group by itself, those with the longest files first."""
NICENESS = 10
"""Of the processes that compute: a tenth of the share of one that waits."""


def group_of(path: Path) -> Group:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    if folder == "slurm":  # one cluster
        return Group("slurm", 0, waits=True)
    if folder == "distributed":  # pools of 1, 2 and 4 ranks, which keep two cores busy
        return Group("distributed", 1, waits=False)
    if folder == "unit" and path.stem in DEADLINES:
        return Group("deadlines", 2, waits=True)
    place = COMPUTING.index(folder) if folder in COMPUTING else len(COMPUTING)
    return Group(f"{folder}/{path.stem}", 3 + place, waits=False)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which puts the group into the test's name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: group_of(item.path).place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path).name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    in_company = "PYTEST_XDIST_WORKER" in os.environ
    if in_company and not group_of(item.path).waits and os.nice(0) < NICENESS:
        os.nice(NICENESS - os.nice(0))


def mark_torture(cases: list[tuple[Any, ...]], core: set[tuple[Any, ...]]) -> list[Any]:
    """Return a test's cases, all but the core marked as "torture": `make torture` runs those.

    Args:
        cases: The values of each case.
        core: The cases that `make test` runs, which must be among them.
    """
    assert core <= set(cases), core - set(cases)
    long = pytest.mark.torture
    return [case if case in core else pytest.param(*case, marks=long) for case in cases]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a small data set of Shakespeare and return its directory.

    The vocabulary, blocks and shards are small, so that reads cross many borders. The processes of
    pytest-xdist share it, and the first one that needs it builds it.
    """
    from pretrain.data.build import build

    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny_data/shards"
    directory.parent.mkdir(exist_ok=True)
    settings = [
        "data.vocab_size=512",
        "data.tokens_per_block=4096",
        "data.tokens_per_shard=500_000",
        "data.tokenizer_training_bytes=500_000",
        f"data.directory={directory}",
    ]
    with open(directory.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A set that is complete is not built again.
        build(load_config("configs/demo.toml", settings))
    return directory


TINY: dict[str, dict[str, Any]] = {
    "run": {"directory": "runs/none", "seed": 7},
    "model": {
        "num_layers": 4,
        "hidden_size": 96,
        "num_attention_heads": 8,
        "ffn_hidden_size": 128,
        # Biases and the fused GELU have more to test than the defaults without them.
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "make_vocab_size_divisible_by": 64,
    },
    "position": {"method": "alibi"},
    "parallel": {},
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "data": {
        "directory": "none",
        "source": "shakespeare",
        "sequence_length": 32,
        "vocab_size": 512,
    },
    "optimizer": {"learning_rate": 1e-3, "clip_grad": 1.0, "weight_decay": 0.1},
    "schedule": {"lr_decay_style": "linear", "lr_warmup_steps": 4},
    "train": {"num_steps": 20},
    "evaluation": {"lengths": [32, 64], "max_tokens": 2048},
    "logging": {"wandb": "disabled", "tensorboard": False},
}
"""Sections of the small config that `tiny_config` starts from."""


def tiny_config(**sections: dict[str, Any]) -> RunConfig:
    """Return the config of a small run, with single keys of its sections replaced."""
    values = copy.deepcopy(TINY)
    for section, keys in sections.items():
        values.setdefault(section, {}).update(keys)
    return parse_config(values, "tiny")


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2pp2sp": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
}
"""The layouts in which the sharded model is checked: name -> (number of processes, [parallel])."""
