"""Test that the gradients of q, k and v leave the Triton kernel in one buffer, without a copy.

Megatron's fused projection makes one tensor [S, B, groups, (q, k, v)], and its gradient has the
same layout. If the kernel writes it in place, the model needs no `cat` (`_Split` in
`pretrain.model.attention`), which would read and write 3 x hidden values of every token and layer.
"""

import pytest
import torch

from pretrain.kernels.call import ScoreBias
from pretrain.kernels.flash.launch import attention_triton
from pretrain.positions.alibi import alibi_slopes
from tests.kernels.test_flash import DEVICE, SMALL, poison


@pytest.mark.parametrize("groups", [1, 2])
def test_slices_get_gradients_that_are_slices_of_one_tensor(groups, monkeypatch):
    """Every element of that tensor is written, and has the same bits as a dense gradient."""
    heads = 2
    sizes = [heads // groups * 16, 16, 16]
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(40, 2, groups, sum(sizes), generator=generator).to(DEVICE)
    whole = whole.requires_grad_()
    towards = torch.randn(40, 2, heads, 16, generator=generator).to(DEVICE)
    bias = ScoreBias(alibi_slopes(heads).to(DEVICE), None, 0, True)

    def gradients(q, k, v):
        out = attention_triton(q, k, v, bias, None, 0.0, skip=True, schedule=SMALL)
        return torch.autograd.grad((out * towards).sum(), (q, k, v))

    q, k, v = whole.split(sizes, dim=3)
    q = q.reshape(40, 2, heads, 16)
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
