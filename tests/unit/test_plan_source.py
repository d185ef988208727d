"""`pretrain plan` of configs whose own layout is refused, and `--out` on top of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pretrain.config import ConfigError, load_config
from pretrain.plan.command import load_for_plan

PAPER = Path("configs/cc100_roberta/alibi_1024.toml")
FEW_LAYERS = "model.num_layers=4"


def run(*words: str) -> str:
    from pretrain.cli.commands import app

    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


ILLEGAL = {
    "tensor size": "tensor_model_parallel_size = 3",
    "too many GPUs for the batch": "world_size = 4096",
    "more stages than layers": "pipeline_model_parallel_size = 64",
    "sequence parallelism of one rank": "sequence_parallel = true",
    "a micro batch larger than the batch": "world_size = 128\n[batch]\nmicro_batch_size = 4096",
    "ZeRO with stages": "zero_stage = 2\npipeline_model_parallel_size = 2",
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_config_whose_layout_is_refused_is_planned(tmp_path, case):
    """The plan says why, and writes a layout that is legal."""
    source, overlay = tmp_path / "run.toml", tmp_path / "planned.toml"
    source.write_text(
        f'base = "{PAPER.resolve()}"\nremove = ["parallel.world_size"]\n'
        f"[model]\nnum_layers = 4\n[parallel]\n{ILLEGAL[case]}\n"
    )
    with pytest.raises(ConfigError) as refused:
        load_config(source)
    text = run(str(source), "--gpus", "8", "--gpu-type", "v100-32", "--out", str(overlay))
    assert f"As configured: not a legal layout. {str(refused.value).splitlines()[0]}" in text
    loaded = load_config(overlay)
    assert loaded.layout(8).world_size == 8
    assert "TP 1 PP 1 DP 8 ZeRO 1" in text and loaded.layout(8).data == 8


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.num_attention_heads=17", "not divisible by model.num_attention_heads = 17"),
        ("parallel.tensor_model_parallel_size=0", "tensor_model_parallel_size = 0: input should"),
        ("batch.rampup_batch_size=[4096, 1, 9]", "begins with 4096 sequences"),
    ],
)
def test_what_no_layout_mends_is_refused(setting, says):
    for more in ([], ["parallel.sequence_parallel=true"]):
        with pytest.raises(ConfigError) as caught:
            load_for_plan(PAPER, [setting, *more])
        assert says in str(caught.value)


def test_the_overlay_of_a_config_that_needs_its_settings(tmp_path):
    """The file alone is refused (its heads do not divide it), and --set on the command mends it."""
    source, overlay = tmp_path / "run.toml", tmp_path / "planned.toml"
    source.write_text(
        f'base = "{PAPER.resolve()}"\n[model]\nnum_layers = 4\nnum_attention_heads = 17\n'
    )
    words = ["--set", "model.num_attention_heads=16", "--out", str(overlay)]
    run(str(source), "--gpus", "8", "--gpu-type", "v100-32", *words)
    assert load_config(overlay).model.num_attention_heads == 16
    # A key that is missing is no other case.
    text = source.read_text().replace("\n[model]", '\nremove = ["data.directory"]\n[model]')
    source.write_text(text)
    words = [*words[:3], str(tmp_path / "other.toml"), "--set", "data.directory=here"]
    run(str(source), "--gpus", "8", "--gpu-type", "v100-32", *words)
    assert load_config(tmp_path / "other.toml").data.directory == "here"
