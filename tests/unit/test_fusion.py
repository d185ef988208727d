"""What is fused where: the decision of train.fusion = auto, on and off."""

import logging

import pytest
import torch

from pretrain.model.gpt import Fusion, _log_once, choose_fusion
from tests.conftest import tiny_config

EVERYTHING = Fusion(compiled=True, loss=True, weight_gradients=True)
NOTHING = Fusion(compiled=False, loss=False, weight_gradients=False)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets a GPU of a compute capability, and a torch version, appear."""

    def appear(capability, version="2.13.0+cu130"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    return appear


def test_a_cpu_is_left_alone_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    assert choose_fusion(tiny_config()) == NOTHING
    assert choose_fusion(tiny_config(train={"fusion": "off"})) == NOTHING
    assert choose_fusion(tiny_config(train={"fusion": "on"})) == EVERYTHING


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_a_gpu_gets_everything_unless_told_otherwise(gpu, capability):
    gpu(capability)
    assert choose_fusion(tiny_config()) == EVERYTHING
    assert choose_fusion(tiny_config(train={"fusion": "off"})) == NOTHING


def test_an_old_gpu_gets_what_needs_no_compiler(gpu, caplog):
    gpu((7, 0))
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="pretrain.model"):
        fusion = choose_fusion(tiny_config())
    assert fusion == Fusion(compiled=False, loss=True, weight_gradients=False)
    assert "loss (train.fusion = auto; torch.compile cannot generate code" in caplog.text


def test_products_are_added_in_fp32_by_a_torch_that_can(gpu):
    """Before 2.10, torch.addmm with out_dtype refused an fp32 matrix to add to."""
    gpu((9, 0), version="2.9.1+cu126")
    assert not choose_fusion(tiny_config()).weight_gradients
    gpu((9, 0), version="2.10.0+cu128")
    assert choose_fusion(tiny_config()).weight_gradients


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ({}, True),
        ({"hidden_act": "gelu"}, False),
        ({"hidden_act": "relu"}, False),
        ({"use_bias": False}, False),
    ],
)
def test_only_the_tanh_approximation_with_a_bias_is_fused(model, fused):
    """Megatron's fused function computes nothing else, whatever its configuration names."""
    assert EVERYTHING.bias_gelu(tiny_config(model=model)) == fused
    assert not NOTHING.bias_gelu(tiny_config(model=model))
