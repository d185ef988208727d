"""Stop and resume: bit for bit in the same layout, within fp32 noise in another."""

from __future__ import annotations

import re

import pytest
import safetensors.torch
import torch

from pretrain.checkpoint.format import BLOCK_BYTES
from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, RunConfig
from pretrain.rundir.checkpoints import checkpoint_directory, find_checkpoint
from tests.conftest import ALL_LAYOUTS, directories, tiny_config
from tests.distributed import tasks
from tests.distributed.test_parallel_equals_dense import VARIANTS


def _config(directory, data, parallel, **sections):
    # Two stages of two chunks have a layer in each.
    layers = 4 if "virtual_pipeline_model_parallel_size" in parallel else 2
    model = {"num_layers": layers, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    sections["model"] = model | sections.get("model", {})
    return tiny_config(
        **directories(directory, data),
        parallel=parallel,
        batch={"micro_batch_size": 4},
        **sections,
    )


def _state(directory, step):
    """Return all that a checkpoint holds of the optimizer as full tensors, read by safetensors."""
    checkpoint = checkpoint_directory(directory, step)
    opened = open_checkpoint(checkpoint)
    shapes, is_nag = opened.shapes, opened.config.optimizer.name == "nag"
    moments = ("momentum_buffer",) if is_nag else ("exp_avg", "exp_avg_sq")
    keys = [f"{kind}/{name}" for kind in ("master", *moments) for name in shapes]
    tensors = {key: torch.full(shapes[key.split("/", 1)[1]], float("nan")) for key in keys}
    for path in checkpoint.glob("*.safetensors"):
        for key, box in safetensors.torch.load_file(path).items():
            name, _, offset = key.partition("@")
            begin = [int(o) for o in offset.split(",")]
            tensors[name][tuple(slice(b, b + n) for b, n in zip(begin, box.shape))] = box
    assert not any(t.isnan().any() for t in tensors.values()), "a part of a tensor was never saved"
    return tensors


# fp16 begins with a loss scale that overflows, so steps are skipped on both sides of the stop.
FP16 = {"train": {"precision": "fp16"}, "optimizer": {"initial_loss_scale_power": 21}}


@pytest.mark.parametrize("case", ["pp2vpp2", "zero3-dp2", "fp16"])
def test_same_layout_is_bit_for_bit(pools, tiny_data, tmp_path, case):
    """tests/end_to_end/test_stopping.py does the same on tensor 2 x pipeline 2."""
    processes, parallel = ALL_LAYOUTS["dp2" if case == "fp16" else case]
    pool = pools(processes)
    settings = FP16 if case == "fp16" else {}
    whole = _config(tmp_path / "whole", tiny_data, parallel, **settings)
    parts = _config(tmp_path / "parts", tiny_data, parallel, **settings)
    task = [tasks.in_fp16_on_cpu] * ("fp16" in case) + [tasks.continue_run]
    half = 3 if "fp16" in case else 2
    uninterrupted = pool.run(*task, whole, "auto", 2 * half)[0]
    first = pool.run(*task, parts, "auto", half)[0]
    second = pool.run(*task, parts, "auto", 2 * half)[0]
    assert (first["began"], second["began"]) == (0, half)
    assert first["losses"] + second["losses"] == uninterrupted["losses"]
    assert first["norms"] + second["norms"] == uninterrupted["norms"]
    assert second["samples"] == uninterrupted["samples"] == 2 * half * 8
    ends = [checkpoint_directory(tmp_path / name, 2 * half) for name in ("whole", "parts")]
    opened = [open_checkpoint(end) for end in ends]
    assert opened[0].adam_steps == opened[1].adam_steps
    assert opened[0].loss_scaler_state == opened[1].loss_scaler_state
    if "fp16" in case:
        assert 0 < opened[0].adam_steps < 3, (
            "no overflow after the resume, or nothing but overflows"
        )
    a, b = _state(tmp_path / "whole", 2 * half), _state(tmp_path / "parts", 2 * half)
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, f"differ: {different}"


def test_layouts_may_change_between_starts(pools, tiny_data, tmp_path):
    """tp2 x pp2 -> tp2 x dp2, ZeRO 3 -> cp2 x dp2 follows one undisturbed run.

    The model has a gate, of which a tensor rank holds rows that are not next to each other. There
    is no dropout, whose masks belong to a layout. Losses are means over 256 tokens of fp32 numbers;
    the layouts differ in the order of their sums, which AdamW carries on for six steps
    (test_optimizer.py).
    """
    block = VARIANTS["rotary-modern"]["model"]
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **block}

    def config(name, parallel):
        return _config(tmp_path / name, tiny_data, parallel, model=off)

    expected = pools(2).run(tasks.continue_run, config("whole", {}), "auto", 6)[0]
    losses = []
    for layout, until in (("tp2pp2sp", 2), ("zero3-tp2sp-dp2", 4), ("cp2-dp2", 6)):
        processes, parallel = ALL_LAYOUTS[layout]
        moving = config("moving", parallel)
        part = pools(processes).run(tasks.continue_run, moving, "auto", until)[0]
        assert part["began"] == until - 2
        losses += part["losses"]
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    a, b = (
        load_global_state(open_checkpoint(find_checkpoint(tmp_path / "whole"))),
        load_global_state(open_checkpoint(find_checkpoint(tmp_path / "moving"))),
    )
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=5e-4)


SLOPES, TABLE = "position.slopes", "embedding.position_embeddings.weight"
PUBLISHED = [2.0 ** -(head + 1) for head in range(8)]
LEARNED = {"method": "learned", "max_position_embeddings": 64}
TRAINED = {"method": "alibi", "trainable_slopes": True}
SURGERY = {
    # The layout and the positions before and after, the key that changes, what then begins anew
    # (its values in closed form; None where they are drawn) and what is dropped.
    "tp2pp2sp": ({"method": "alibi"}, TRAINED, "trainable_slopes", {"slopes": PUBLISHED}, ()),
    "zero3-dp2": (LEARNED, TRAINED, "method", {"slopes": PUBLISHED}, (TABLE,)),
    "tp2": (TRAINED, {"method": "t5"}, "method", {"relative_attention_bias": None}, (SLOPES,)),
    "dp2": (TRAINED, TRAINED | {"slopes": [0.5] * 8}, "slopes", {"slopes": [0.5] * 8}, ()),
    "pp2": (TRAINED, {"method": "alibi"}, "trainable_slopes", {}, (SLOPES,)),
    # Nothing changes but the layout: slopes and moments survive.
    "tp2cp2sp": (TRAINED, TRAINED, None, {}, ()),
}


@pytest.mark.parametrize("layout", SURGERY)
def test_positions_may_change_at_a_resume(pools, tiny_data, tmp_path, layout):
    """What a method learns begins anew or is dropped; all else goes on, whatever the layout."""
    before, after, key, anew, dropped = SURGERY[layout]
    first = _config(tmp_path / "a", tiny_data, {}, position=before)
    pools(2).run(tasks.continue_run, first, "auto", 2)
    processes, parallel = ALL_LAYOUTS[layout]
    second = _config(tmp_path / "b", tiny_data, parallel, position=after)
    allowed = [] if key is None else [f"position.{key}"]
    source = str(checkpoint_directory(tmp_path / "a", 2))
    if allowed:
        for said in pools(processes).run(refusal, second, source):
            assert re.search(rf"or change it .* --allow-changed {allowed[0]}", said)
    pools(processes).run(tasks.continue_run, second, source, 2, allowed)
    a, b = _state(tmp_path / "a", 2), _state(tmp_path / "b", 2)
    begun = {name for name in b if name.split("/")[1].removeprefix("position.") in anew}
    assert a.keys() - b.keys() == {name for name in a if name.split("/")[1] in dropped}
    assert begun >= b.keys() - a.keys()
    for name in b:
        kind, parameter = name.split("/")
        if name not in begun:
            assert torch.equal(a[name], b[name]), name
        elif kind != "master":
            assert not b[name].any(), name
        elif (values := anew[parameter.removeprefix("position.")]) is not None:
            assert b[name].tolist() == values
    changes = open_checkpoint(checkpoint_directory(tmp_path / "b", 2)).origin.changes
    assert [change.key for change in changes] == allowed


def test_a_load_in_the_same_layout_reads_a_ranks_own_file_once(pools, tiny_data, tmp_path):
    """No rank reads another's moments, and of its own file two blocks more than it needs."""
    config = _config(tmp_path / "run", tiny_data, {})
    pools(2).run(tasks.continue_run, config, "auto", 1)
    for rank, found in enumerate(pools(2).run(tasks.bytes_of_a_load, config)):
        name = f"rank-{rank:05d}.safetensors"
        assert found["read"].keys() == {name}
        assert found["needed"] <= found["read"][name] <= found["needed"] + 2 * BLOCK_BYTES


# ---- tasks of the ranks --------------------------------------------------------------------------
def refusal(config: RunConfig, resume: str) -> str:
    """Return why a run does not begin."""
    with pytest.raises(ConfigError) as refused:
        tasks.loaded_run(config, resume)
    return str(refused.value)
