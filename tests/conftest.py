"""Share a tiny data set, a small config and the layouts among all tests."""

from __future__ import annotations

import copy
import fcntl
import gc
import multiprocessing.forkserver
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config import RunConfig, load_config, parse_config
from pretrain.platform import make_caches_private
from pretrain.topology import finish

warnings.simplefilter("ignore")
# Until the tests are collected, almost all that is made stays, and is looked at again and again.
gc.disable()
# As many processes compute as there are cores.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter. Triton reads this variable when it is
    # first imported, which any library may do, so it is set before everything else.
    os.environ["TRITON_INTERPRET"] = "1"
# Otherwise each process that compiles starts two of its own, each of which imports torch, and
# compiles programs to learn what the processor says of itself, too: 7 s.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
# Ranks that a test starts by a command and ranks that it runs itself share one cache. Otherwise
# each kind would compile torch's C++ headers again, which takes 5 s.
make_caches_private()
# pytest-xdist sets the width of a terminal, to which the processes of its tests would cut tables.
os.environ.pop("COLUMNS", None)
# A non-interactive shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP.
# Child processes inherit this, and the tests that send signals to processes they start would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def mark_torture(cases: list[tuple[Any, ...]], core: set[tuple[Any, ...]]) -> list[Any]:
    """Return a test's cases, all but the core marked as "torture": `make torture` runs those.

    Args:
        cases: The values of each case.
        core: The cases that `make test` runs, which must be among them.
    """
    assert core <= set(cases), core - set(cases)
    long = pytest.mark.torture
    return [case if case in core else pytest.param(*case, marks=long) for case in cases]


@pytest.fixture(autouse=True)
def closed_process_group() -> Iterator[None]:
    """Close what a test leaves open; a command that ends in an error leaves it to its process.

    Modules that it imported stay as well, and each collection of garbage would look at them.
    """
    imported = len(sys.modules)
    yield
    if torch.distributed.is_initialized():
        finish()
    if len(sys.modules) > imported + 50:
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again, and start the server from which the tests' commands are forked.

    A process has one such server. A test that builds data would start one without the imports, and
    each command would then make them by itself, in three seconds of a processor.
    """
    gc.freeze()
    gc.enable()
    if "tests.end_to_end.commands" in sys.modules:  # says what the server imports
        multiprocessing.forkserver.ensure_running()


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


def directories(directory: Path, data: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a config that say where its run and its data are."""
    return {"run": {"directory": str(directory)}, "data": {"directory": str(data)}}


_TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
_TP2SP = {**_TP2, "sequence_parallel": True}
_PP2 = {"pipeline_model_parallel_size": 2}
_CP2 = {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, _TP2),
    "pp2": (2, _PP2),
    "tp2pp2sp": (4, {**_TP2SP, **_PP2}),
    "pp2vpp2": (2, {**_PP2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, _CP2),
    "cp4": (4, {"context_parallel_size": 4}),
    "tp2cp2sp": (4, {**_TP2SP, **_CP2}),
    "pp2vpp2cp2": (4, {**_PP2, "virtual_pipeline_model_parallel_size": 2, **_CP2}),
}
"""The layouts in which the sharded model is checked: name -> (number of processes, [parallel])."""
ALL_LAYOUTS = {
    **LAYOUTS,
    "one": (1, {}),
    "dp4": (4, {}),
    "tp2sp": (2, _TP2SP),
    "tp2-dp2": (4, _TP2),
    "tp2sp-dp2": (4, _TP2SP),
    "pp2-dp2": (4, _PP2),
    "cp2-dp2": (4, _CP2),
    "zero2-cp2": (2, {**_CP2, "zero_stage": 2}),
    "zero3-cp2-dp2": (4, {**_CP2, "zero_stage": 3}),
    "zero2-dp2": (2, {"zero_stage": 2}),
    "zero3-dp2": (2, {"zero_stage": 3}),
    "zero2-tp2sp-dp2": (4, {**_TP2SP, "zero_stage": 2}),
    "zero3-tp2sp-dp2": (4, {**_TP2SP, "zero_stage": 3}),
}
"""These, and those of single questions."""
