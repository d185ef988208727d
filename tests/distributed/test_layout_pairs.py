"""A checkpoint of any layout loads on any other: every ordered pair, bit for bit.

Masters and moments are fp32 and only move between layouts, so what a layout saves right after it
has loaded is what the other layout saved.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, RunConfig
from pretrain.config.rules import check_layout
from pretrain.rundir.checkpoints import checkpoint_directory
from tests.conftest import directories, mark_torture, tiny_config
from tests.distributed.tasks import save_and_take_a_step
from tests.distributed.test_resume import _state

STEP = 2
WORLD_SIZES = (1, 2, 4)
# A loss is a mean over 256 tokens. Layouts differ in the order of their sums (test_resume.py), and
# in bf16 each sum rounds to 8 bits.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2**-8}


def config_of(parallel: dict[str, Any], precision: str, directory: Any, data: Any) -> RunConfig:
    return tiny_config(
        **directories(directory, data),
        parallel=parallel,
        train={"precision": precision},
    )


def layouts() -> dict[str, tuple[int, dict[str, Any]]]:
    """Return every layout that the config accepts at these world sizes, by its name."""
    found = {}
    sizes, flags = (1, 2, 4), (False, True)
    axes = (WORLD_SIZES, sizes, sizes, (1, 2), flags, flags, (1, 2, 3))
    for world, tp, pp, cp, vpp, sp, zero in product(*axes):
        dp = world // (tp * pp * cp)
        # ZeRO's stages differ in what the replicas share.
        is_legal = tp * pp * cp * dp == world and zero in (1, *[2, 3] * (cp * dp > 1))
        if not is_legal or (vpp and pp == 1) or (sp and tp == 1):
            continue
        parallel: dict[str, Any] = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "sequence_parallel": sp,
            "zero_stage": zero,
        }
        if vpp:
            parallel["virtual_pipeline_model_parallel_size"] = 2
        try:
            check_layout(config_of(parallel, "fp32", "none", "none"), world)
        except ConfigError:
            continue
        name = f"tp{tp}pp{pp}dp{dp}" + "cp2" * (cp == 2) + "vpp2" * vpp + "sp" * sp
        name += f"zero{zero}" * (zero > 1)
        found[name] = (world, parallel)
    return found


LAYOUTS = layouts()
CORE = {
    ("fp32", "tp2pp2dp1vpp2sp", "tp1pp1dp2zero3"),
    ("bf16", "tp1pp1dp2zero2", "tp2pp1dp1sp"),
    ("fp32", "tp1pp1dp1", "tp1pp2dp1cp2vpp2"),
    ("fp32", "tp1pp1dp2cp2zero3", "tp2pp1dp1"),
}
Saved = Callable[[str, str], tuple[Any, float]]


@pytest.fixture(scope="module")
def saved(pools, tiny_data, tmp_path_factory) -> Saved:
    """Return saved(precision, layout): a run with a checkpoint, and the loss of its next step."""
    made: dict[tuple[str, str], tuple[Any, float]] = {}

    def save(precision: str, layout: str) -> tuple[Any, float]:
        if (precision, layout) not in made:
            world, parallel = LAYOUTS[layout]
            directory = tmp_path_factory.mktemp(f"{layout}-{precision}")
            config = config_of(parallel, precision, directory, tiny_data)
            losses = pools(world).run(save_and_take_a_step, config, "auto", STEP)
            made[precision, layout] = (directory, losses[0])
        return made[precision, layout]

    return save


def test_the_layouts_are_those_that_the_config_accepts():
    assert len(LAYOUTS) == 40
    counts = [sum(world == size for world, _ in LAYOUTS.values()) for size in WORLD_SIZES]
    assert counts == [1, 10, 29], sorted(LAYOUTS)


@pytest.mark.parametrize(
    ("precision", "source", "target"),
    mark_torture(list(product(LOSS_TOLERANCE, LAYOUTS, LAYOUTS)), CORE),
)
def test_a_checkpoint_of_any_layout_loads_on_any_other(
    pools, saved, tiny_data, tmp_path, precision, source, target
):
    run, next_loss = saved(precision, source)
    world, parallel = LAYOUTS[target]
    config = config_of(parallel, precision, tmp_path, tiny_data)
    losses = pools(world).run(save_and_take_a_step, config, str(checkpoint(run)), STEP)
    a, b = _state(run, STEP), _state(tmp_path, STEP)
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, f"differ: {different}"
    opened = [open_checkpoint(checkpoint(each)) for each in (run, tmp_path)]
    assert opened[0].trainer_state == opened[1].trainer_state
    assert opened[0].adam_steps == opened[1].adam_steps == STEP
    assert losses[0] == pytest.approx(next_loss, rel=LOSS_TOLERANCE[precision])


def checkpoint(run: Path) -> Path:
    return checkpoint_directory(run, STEP)
