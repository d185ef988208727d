"""A Hugging Face class is one table: a toy one works everywhere as soon as it is registered."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from pretrain.config import load_config
from pretrain.huggingface.base import Ours
from pretrain.huggingface.classes import CLASSES, Opt
from pretrain.huggingface.consumers import describe_export
from pretrain.huggingface.folder import MARKER, to_huggingface
from pretrain.huggingface.import_model import import_folder
from pretrain.huggingface.parity import check_parity
from tests.reference.dense_gpt import DenseGPT, make_config, random_state
from tests.unit.test_export import random_ids, tokenizer_path
from tests.unit.test_import import masters, same_bits

__all__ = ["tokenizer_path"]


# ---- What somebody adds to transformers: an OPT without positions --------------------------------
class NoPositions(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1)


class BareConfig(OPTConfig):
    model_type = "bare"


class BareForCausalLM(OPTForCausalLM):
    config_class = BareConfig

    def __init__(self, config: BareConfig) -> None:
        super().__init__(config)
        self.model.decoder.embed_positions = NoPositions()
        self.post_init()


# ---- What is added here --------------------------------------------------------------------------
class Bare(Opt):
    model_type = "bare"
    name = "BareForCausalLM"
    positions = ("none",)
    rows = (
        *(
            row
            for row in Opt.rows
            if getattr(row, "ours", "") != "position.max_position_embeddings"
        ),
        Ours("model.hidden_act", "relu", "{name} has rectified MLPs"),
    )
    modules: ClassVar = {
        k: v for k, v in Opt.modules.items() if k != "embedding.position_embeddings"
    }
    is_bounded = False

    def note(self, config: Any, settings: Any) -> str:
        return "This model is bare."

    def extra(self, config: Any, factors: Any, max_length: int) -> dict[str, torch.Tensor]:
        return {}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    AutoConfig.register("bare", BareConfig, exist_ok=True)
    AutoModelForCausalLM.register(BareConfig, BareForCausalLM, exist_ok=True)
    monkeypatch.setitem(CLASSES, "bare", Bare())


def test_it_exports_and_comes_back_bit_for_bit(tmp_path, tokenizer_path):
    config = make_config("none", hidden_act="relu")
    assert list(describe_export(config)) == [
        "BareForCausalLM in fp32, bf16 and fp16, for up to 1,024 tokens",
        "not in vllm, llama.cpp: it has no BareForCausalLM",
    ]
    state, folder = random_state(config, seed=5), tmp_path / "hf"
    name = to_huggingface(config, state, tokenizer_path, folder, max_length=1024)
    assert name == "BareForCausalLM" == type(AutoModelForCausalLM.from_pretrained(folder)).__name__
    assert "This model is bare." in (folder / "README.md").read_text()
    dense = DenseGPT(config).load_global_state(state).requires_grad_(False)
    assert check_parity(dense, folder, [random_ids(2, 64), random_ids(1, 256)]).passed
    import_folder(folder, tmp_path / "run")
    got = masters(tmp_path / "run")
    assert got.keys() == state.keys() and all(same_bits(got[key], state[key]) for key in state)
    # As if it came from elsewhere: the table alone says what it is.
    (folder / MARKER).unlink()
    import_folder(folder, tmp_path / "other")
    found = load_config(tmp_path / "other/config.toml")
    assert (found.position.method, found.model.hidden_act) == ("none", "relu")
    assert (found.ffn_hidden_size, found.padded_vocab_size) == (config.ffn_hidden_size, 512)
