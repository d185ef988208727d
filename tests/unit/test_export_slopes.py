"""Exports whose slopes no stock class computes: a class in the folder, and stock loaders refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BloomForCausalLM, MptForCausalLM

from pretrain.config import load_config
from pretrain.config.describe import describe_export
from pretrain.huggingface import check_parity, to_huggingface
from pretrain.huggingface.import_model import import_folder
from pretrain.huggingface.parity import TRUSTED
from tests.reference.dense_gpt import DenseGPT, random_state
from tests.unit.test_dense_gpt import make_config
from tests.unit.test_export import MAX_LENGTH, random_ids, tokenizer_path
from tests.unit.test_import import masters, same_bits

__all__ = ["tokenizer_path"]

RANGE = {"first": 0.9, "last": 0.001}
MPT: dict[str, Any] = {"use_bias": False, "hidden_act": "gelu"}
MODELS = {
    "mpt_range": ("MptSlopesForCausalLM", make_config("alibi", **MPT, position_slopes=RANGE)),
    "mpt_trained": (
        "MptSlopesForCausalLM",
        make_config("alibi", **MPT, position_trainable_slopes=True),
    ),
    "mpt_untied": (
        "MptSlopesForCausalLM",
        make_config("alibi", **MPT, position_slopes=[0.0] * 11 + [2.5], tie_word_embeddings=False),
    ),
    "bloom_range": ("BloomSlopesForCausalLM", make_config("alibi", position_slopes=RANGE)),
    "bloom_trained": (
        "BloomSlopesForCausalLM",
        make_config("alibi", position_trainable_slopes=True, position_slopes=RANGE),
    ),
    "bloom_norm": (
        "BloomSlopesForCausalLM",
        make_config(
            "alibi",
            position_trainable_slopes=True,
            embedding_layernorm=True,
            tie_word_embeddings=False,
        ),
    ),
}
STOCK = {"mpt": (MptForCausalLM, "n_heads"), "bloom": (BloomForCausalLM, "n_head")}
"""The stock class that has the weights of a folder, and the setting that it refuses."""
TRAINED = torch.tensor([0.7, -0.002, 1.3, 0.0, *torch.logspace(-1, -3, 8).tolist()])
"""Where training may lead: also above 1, to 0 and below."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer_path):
    """Return a function: name -> (dense model, folder, class returned), each exported once."""
    made = {}

    def export(name: str) -> tuple[DenseGPT, Path, str]:
        if name not in made:
            config = MODELS[name][1]
            state = random_state(config, seed=5)
            if "position.slopes" in state:
                state["position.slopes"] = TRAINED.clone()
            folder = tmp_path_factory.mktemp("export") / name
            class_name = to_huggingface(
                config, state, tokenizer_path, folder, max_length=MAX_LENGTH
            )
            dense = DenseGPT(config).load_global_state(state).requires_grad_(False)
            made[name] = (dense, folder, class_name)
        return made[name]

    return export


@pytest.fixture
def trusted(tmp_path, monkeypatch) -> Callable[..., Any]:
    """Return a function that loads a folder with its own code, as a user would."""
    import transformers.dynamic_module_utils as modules

    # transformers copies the code to this folder in the user's cache.
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    # Another test's package of the same name would hide this one's.
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=True, local_files_only=True
        )
        # The folder's code, not the package's.
        assert not type(model).__module__.startswith("pretrain.")
        return model.eval()

    return load


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_dense_reference_at_every_length(name, exported, trusted):
    dense, folder, class_name = exported(name)
    model = trusted(folder)
    assert class_name == MODELS[name][0] == type(model).__name__
    for length in (64, 512):
        ids = random_ids(1, length)
        with torch.no_grad():
            # fp32 sums of 64 to 512 terms; logits are below 3.
            torch.testing.assert_close(model(ids).logits, dense(ids), rtol=0, atol=1e-4)
    # The comparison that every export makes.
    report = check_parity(dense, folder, [random_ids(1, 256)], precisions=("bf16",))
    assert report.passed, report.format()
    assert f"{class_name} in the folder computes the same function" in report.format()
    assert [row.loader for row in report.precisions] == [TRUSTED]
    assert report.precisions[0].passed, report.format()


@pytest.mark.parametrize("name", ["mpt_trained", "bloom_trained"])
def test_cache_and_left_padding(name, exported, trusted):
    dense, folder, _ = exported(name)
    model = trusted(folder)
    rows = random_ids(1, 100, seed=1), random_ids(1, 70, seed=2)
    ids = torch.full((2, 100), 2)
    ids[0], ids[1, 30:] = rows[0], rows[1]
    mask = (torch.arange(100) >= torch.tensor([[0], [30]])).long()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        first = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=True)
        rest = model(ids[:, 90:], attention_mask=mask, past_key_values=first.past_key_values)
    expected = dense(rows[0])[0], dense(rows[1])[0]
    for got, want in (
        (whole[0], expected[0]),
        (whole[1, 30:], expected[1]),
        (rest.logits[0], expected[0][90:]),
        (rest.logits[1], expected[1][60:]),
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    ids = random_ids(2, 60, seed=3)
    model.generation_config.eos_token_id = None
    got = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    for _ in range(8):
        ids = torch.cat([ids, dense(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got, ids)


@pytest.mark.parametrize("name", ["mpt_range", "bloom_range"])
def test_stock_loaders_refuse_the_folder(name, exported, monkeypatch):
    """They would compute the slopes of another model, and say nothing."""
    _, folder, _ = exported(name)
    # At a terminal, transformers asks.
    monkeypatch.setattr("builtins.input", lambda _: "n")
    for kind in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            kind.from_pretrained(folder, local_files_only=True)
    # By name, the class that has these weights.
    stock, setting = STOCK[name.partition("_")[0]]
    with pytest.raises(StrictDataclassFieldValidationError, match=setting):
        stock.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("name", ["mpt_trained", "bloom_trained"])
def test_a_folder_that_was_saved_again_is_refused_and_loads_too(name, exported, trusted, tmp_path):
    """Someone who trains on with transformers saves the same slopes under the same guard."""
    dense, folder, _ = exported(name)
    model = trusted(folder)
    model.save_pretrained(tmp_path / "again")
    settings = json.loads((tmp_path / "again/config.json").read_text())
    assert settings["slopes"] == TRAINED.tolist()
    again = trusted(tmp_path / "again")
    ids = random_ids(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, dense(ids), rtol=0, atol=5e-5)
    stock, setting = STOCK[name.partition("_")[0]]
    # The number of heads: transformers 4 does not check types, and its attention divides by it.
    assert settings[setting] is None
    with pytest.raises(StrictDataclassFieldValidationError, match=setting):
        stock.from_pretrained(tmp_path / "again", local_files_only=True)


def test_slopes_survive_16_bit_loading(exported, trusted):
    """They are settings in fp32; as a weight they would be rounded with the others."""
    _, folder, _ = exported("mpt_trained")
    model = trusted(folder, torch.bfloat16)
    bias = model.transformer.build_mpt_alibi_tensor(12, 3)
    assert torch.equal(bias[:, 0, 1], -TRAINED)


@pytest.mark.parametrize("name", ["mpt_range", "mpt_trained", "bloom_trained", "bloom_norm"])
def test_export_import_export_is_bit_equal(name, exported, tmp_path, tokenizer_path):
    dense, folder, _ = exported(name)
    state = dict(dense.named_parameters())
    import_folder(folder, tmp_path / "run")
    got = masters(tmp_path / "run")
    assert got.keys() == state.keys()
    assert all(same_bits(got[key], state[key]) for key in state)
    found = load_config(tmp_path / "run/config.toml")
    assert found.position == MODELS[name][1].position
    to_huggingface(found, got, found.data.tokenizer, tmp_path / "again", max_length=MAX_LENGTH)
    first, second = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert all(same_bits(first[key], second[key]) for key in first)
    assert (folder / "config.json").read_text() == (tmp_path / "again/config.json").read_text()


def test_what_is_said_before_training_and_on_the_card(exported):
    lines = describe_export(MODELS["mpt_trained"][1])
    assert "MptSlopesForCausalLM in fp32, bf16 and fp16" in lines[0]
    assert "stock loaders refuse the folder" in lines[0]
    assert any(line.startswith("not in vLLM: it has no MptSlopesForCausalLM") for line in lines)
    for name, stock in (("mpt_trained", "MPT"), ("bloom_trained", "Bloom")):
        card = (exported(name)[1] / "README.md").read_text()
        assert "from_pretrained(folder, trust_remote_code=True)" in card
        assert "as training left them: 0.7, -0.002, 1.3, 0, 0.1, " in card
        assert f"Stock {stock} would\ncompute others" in card
    stock = describe_export(make_config("alibi", **MPT))
    assert stock[0].startswith("MptForCausalLM in fp32, bf16 and fp16")
