"""What is fused where: the decision of train.fusion = auto, on and off."""

import pytest
import torch

from pretrain.model.gpt import Fusion, choose_fusion
from tests.conftest import tiny_config

EVERYTHING = Fusion(compiled=True, layers=False, loss=True, weight_gradients=True)
NOTHING = Fusion(compiled=False, layers=False, loss=False, weight_gradients=False)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets a GPU of a compute capability appear."""

    def appear(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        # No GPU of this machine can be tried out.
        monkeypatch.setattr("pretrain.platform.device", lambda: torch.device("cpu"))
        monkeypatch.setattr("pretrain.platform._adds", lambda dtype, device: True)

    return appear


def test_a_cpu_is_left_alone_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)
    assert choose_fusion(tiny_config()) == NOTHING
    assert choose_fusion(tiny_config(train={"fusion": "off"})) == NOTHING
    assert choose_fusion(tiny_config(train={"fusion": "on"})) == EVERYTHING
    layers = choose_fusion(tiny_config(train={"fusion": "layers"}))
    assert layers == Fusion(compiled=False, layers=True, loss=True, weight_gradients=False)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_a_gpu_gets_everything_unless_told_otherwise(gpu, capability):
    gpu(capability)
    assert choose_fusion(tiny_config()) == EVERYTHING
    assert choose_fusion(tiny_config(train={"fusion": "off"})) == NOTHING


def test_an_old_gpu_gets_what_needs_no_compiler(gpu):
    gpu((7, 0))
    assert choose_fusion(tiny_config()) == Fusion(
        compiled=False, layers=False, loss=True, weight_gradients=False
    )


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ({}, True),
        ({"hidden_act": "gelu"}, False),
        ({"hidden_act": "relu"}, False),
        ({"use_bias": False}, False),
        ({"gated_linear_unit": True}, False),
        ({"gated_linear_unit": True, "hidden_act": "silu", "use_bias": False}, True),
    ],
)
def test_only_the_tanh_approximation_with_a_bias_is_fused(model, fused):
    """Megatron's fused function computes nothing else, whatever its configuration names."""
    assert EVERYTHING.activation(tiny_config(model=model)) == fused
    assert not NOTHING.activation(tiny_config(model=model))
