"""Exports whose slopes no stock class computes: a class in the folder, and stock loaders refuse."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM, BloomForCausalLM, MptForCausalLM

from pretrain.huggingface.parity import TRUSTED, check_parity
from tests.unit.test_export import (
    SLOPES,
    TRAINED,
    exported,
    random_ids,
    tokenizer_path,
    trusted,
)

__all__ = ["exported", "tokenizer_path", "trusted"]

STOCK = {"mpt": (MptForCausalLM, "n_heads"), "bloom": (BloomForCausalLM, "n_head")}
"""The stock class that has the weights of a folder, and the setting that it refuses."""


@pytest.mark.parametrize("name", SLOPES)
def test_logits_equal_the_dense_reference_at_every_length(name, exported, trusted):
    dense, folder, class_name = exported(name)
    model = trusted(folder)
    assert class_name == SLOPES[name][0] == type(model).__name__
    for length in (64, 512):
        ids = random_ids(1, length)
        with torch.no_grad():
            # fp32 sums of 64 to 512 terms; logits are below 3.
            torch.testing.assert_close(model(ids).logits, dense(ids), rtol=0, atol=1e-4)
    # The comparison that every export makes.
    report = check_parity(dense, folder, [random_ids(1, 256)], precisions=("bf16",))
    assert report.passed, report.format()
    assert f"{class_name} in the folder computes the same function" in report.format()
    assert [row.loader for row in report.rows] == [TRUSTED, TRUSTED]
    assert report.rows[1].passed, report.format()


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
