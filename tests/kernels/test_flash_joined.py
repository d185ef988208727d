"""Test that the gradients of q, k and v leave the Triton kernel in one buffer, without a copy.

Megatron's fused projection makes one tensor [S, B, groups, (q, k, v)], and its gradient has the
same layout. If the kernel writes it in place, the model needs no `cat` (`_Split` in
`pretrain.model.attention`), which would read and write 3 x hidden values of every token and layer.
"""

import json
import subprocess
import sys

import pytest
import torch

from pretrain.kernels.call import ScoreBias
from pretrain.kernels.flash.launch import attention_triton
from pretrain.positions.alibi import alibi_slopes
from tests.kernels.test_flash import DEVICE, SMALL, poison

# Megatron keeps its process groups in global variables, so the model runs in a process of its own,
# with torch's fake process group of one rank. Prints, for each case: how many times a backward pass
# of self-attention concatenated, the same if queries, keys and values are copied before the kernel
# sees them, the gradients that differ between the two, and the largest relative error of a gradient
# against the backend "reference".
SCRIPT = """
import json, sys, warnings; warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.conftest import tiny_config
from pretrain import platform
from pretrain.topology import Process, finish, initialize

BATCH, LENGTH = 2, 70

def differentiate(config, copy_first):
    from pretrain.model.gpt import build_model
    (model,) = build_model(config)
    layer = model.decoder.layers[0].self_attention
    if copy_first:
        layer.core_attention.register_forward_pre_hook(
            lambda module, args: tuple(x.clone() for x in args[:3]) + args[3:])
    generator = torch.Generator().manual_seed(3)
    hidden, towards = torch.randn(2, LENGTH, BATCH, 64, generator=generator)
    hidden, towards = (x.to(platform.device()) for x in (hidden, towards))
    hidden.requires_grad_()
    out, _ = layer(hidden, None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (out * towards).sum().backward()
    cats = sum(event.name == "aten::cat" for event in profile.events())
    position = [x for x in layer.core_attention.position[0].parameters()]
    leaves = [hidden, *layer.parameters(), *position]
    return cats, [x.grad for x in leaves if x.grad is not None]

results = {}
for name, sections in json.loads(sys.argv[1]).items():
    model = {"hidden_size": 64, "num_attention_heads": 2, "num_layers": 1} | sections["model"]
    configs = [
        tiny_config(**sections | {"model": model | {"attention_backend": backend}})
        for backend in ("triton", "reference")
    ]
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    initialize(configs[0], Process(0, 1, 0, "127.0.0.1", 0))
    cats, ours = differentiate(configs[0], copy_first=False)
    cats_of_copies, copied = differentiate(configs[0], copy_first=True)
    _, plain = differentiate(configs[1], copy_first=False)
    finish()
    results[name] = {
        "cats": cats,
        "cats of copies": cats_of_copies,
        "gradients": len(ours),
        "different": sum(not torch.equal(x, y) for x, y in zip(ours, copied, strict=True)),
        "error": max(
            ((x - y).norm() / y.norm()).item() for x, y in zip(ours, plain, strict=True)
        ),
    }
print(json.dumps(results))
"""
# Sections of the config, concatenations in a backward pass, and gradients: those of the hidden
# states, of two weights and one bias (the layer returns the other), and of the position method.
MODELS = {
    "alibi": ({"model": {}}, 0, 4),
    "trained slopes": ({"model": {}, "position": {"trainable_slopes": True}}, 0, 5),
    "t5": ({"model": {}, "position": {"method": "t5"}}, 0, 5),
    "one group": ({"model": {"num_query_groups": 1}}, 0, 4),
    # The heads of two groups are not evenly spaced, so that Megatron copies the queries.
    "two groups": ({"model": {"num_attention_heads": 4, "num_query_groups": 2}}, 1, 4),
    # The recomputed attention starts from leaves.
    "recomputed": ({"model": {}, "train": {"recompute_granularity": "selective"}}, 1, 4),
}


@pytest.fixture(scope="module")
def measured():
    """Return what SCRIPT prints."""
    cases = {name: sections for name, (sections, _, _) in MODELS.items()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_self_attention_concatenates_no_gradients(measured, name):
    _, cats, gradients = MODELS[name]
    result = measured[name]
    assert result["cats"] == cats
    assert result["cats of copies"] == 1, "the count does not see a cat"
    assert result["gradients"] == gradients
    assert result["different"] == 0
    assert result["error"] < 1e-5


@pytest.mark.parametrize("groups", [1, 2])
def test_slices_get_gradients_that_are_slices_of_one_tensor(groups, monkeypatch):
    """Every element of that tensor is written, and has the same bits as a dense gradient."""
    heads = 2
    sizes = [heads // groups * 16, 16, 16]
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(67, 2, groups, sum(sizes), generator=generator).to(DEVICE)
    whole = whole.requires_grad_()
    towards = torch.randn(67, 2, heads, 16, generator=generator).to(DEVICE)
    bias = ScoreBias(alibi_slopes(heads).to(DEVICE), None, 0, True)

    def gradients(q, k, v):
        out = attention_triton(q, k, v, bias, None, 0.0, skip=True, schedule=SMALL)
        return torch.autograd.grad((out * towards).sum(), (q, k, v))

    q, k, v = whole.split(sizes, dim=3)
    q = q.reshape(67, 2, heads, 16)
    dense = gradients(q.clone(), k.clone(), v.clone())
    assert all(x.is_contiguous() for x in dense)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: poison(empty(*size, **options)))
    joined = gradients(q, k, v)
    assert len({x.untyped_storage().data_ptr() for x in joined}) == 1
    assert sum(x.numel() for x in joined) * 4 == joined[0].untyped_storage().nbytes()
    for x, gradient, expected in zip((q, k, v), joined, dense):
        assert gradient.stride() == x.stride()
        assert gradient.storage_offset() == x.storage_offset()
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    "arrangement", ["another order", "a gap", "keys of two tensors", "more keys than queries"]
)
def test_other_views_get_dense_gradients(arrangement):
    """Tensors that are views of one tensor, but are not all of it in the order q, k, v."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(40, 1, 2, 4 * 16, generator=generator).to(DEVICE).requires_grad_()
    if arrangement == "a gap":
        q, _, k, v = whole.split(16, dim=3)
    else:
        q, k, v = whole[..., : 3 * 16].clone().split(16, dim=3)
    if arrangement == "another order":
        q, k = k, q
    elif arrangement == "keys of two tensors":
        k = whole[..., 16:32]
    elif arrangement == "more keys than queries":
        q = q[7:]
    bias = ScoreBias(alibi_slopes(2).to(DEVICE), None, 0, True)

    def gradients(*tensors):
        out = attention_triton(*tensors, bias, None, 0.0, skip=True, schedule=SMALL)
        return torch.autograd.grad(out.square().sum(), tensors)

    made = gradients(q, k, v)
    for x, expected in zip(made, gradients(q.clone(), k.clone(), v.clone())):
        assert x.is_contiguous() and torch.equal(x, expected)


def test_leaves_take_their_gradients_without_a_copy():
    """Autograd would copy a slice into a leaf. Recomputed attention has leaves that are slices."""
    whole = torch.randn(40, 1, 2, 3 * 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    leaves = [x.requires_grad_() for x in whole.split(16, dim=3)]
    bias = ScoreBias(alibi_slopes(2).to(DEVICE), None, 0, True)
    arrived = []
    for leaf in leaves:
        leaf.register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
    attention_triton(*leaves, bias, None, 0.0, skip=True, schedule=SMALL).sum().backward()
    assert {leaf.grad.data_ptr() for leaf in leaves} == set(arrived) and len(set(arrived)) == 3
