"""The same code on one GPU: losses and gradients equal the dense reference's. Skipped without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pretrain import platform
from tests.distributed import tasks
from tests.distributed.pool import Pool
from tests.distributed.test_adaptive import _expected as expected_of_adaptive
from tests.distributed.test_adaptive import adaptive_config
from tests.distributed.test_optimizer import _config, _expected, assert_losses_and_norms
from tests.distributed.test_parallel_equals_dense import VARIANTS, variant_config
from tests.distributed.test_parallel_equals_dense import _expected as expected_of_variant

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: the GPU path was not run"
    ),
]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Pool]:
    """One process on the first GPU, over NCCL."""
    pool = Pool(1, cuda=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_gradients_equal_the_dense_reference_on_the_cpu(gpu, variant, heads):
    """Both sides compute in fp32, without TF32.

    The GPU sums in another order, and its exp and log are rounded once more.
    """
    state, tokens, logits, loss, gradients = expected_of_variant(variant, heads)
    actual = gpu.run(tasks.gradients, variant_config(variant, heads, {}), state, tokens)[0]
    torch.testing.assert_close(actual["logits"].cpu(), logits, rtol=1e-4, atol=1e-4)
    assert actual["loss"] == pytest.approx(loss, rel=1e-5)
    for name, expected in gradients.items():
        torch.testing.assert_close(actual["gradients"][name].cpu(), expected, rtol=1e-3, atol=1e-4)


def test_a_product_of_16_bit_matrices_adds_to_fp32(gpu):
    """From compute capability 8.0 on; else the log says what torch or cuBLAS refused."""
    is_modern = torch.cuda.get_device_capability() >= (8, 0)
    assert gpu.run(platform.can_accumulate_products) == [is_modern]


@pytest.mark.parametrize("fusion", ["auto", "off"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adaptive_softmax_equals_the_dense_reference_on_the_cpu(gpu, tied, fusion):
    state, tokens, logits, loss, gradients = expected_of_adaptive(tied)
    config = adaptive_config(tied=tied, train={"fusion": fusion})
    actual = gpu.run(tasks.gradients, config, state, tokens)[0]
    torch.testing.assert_close(actual["logits"].cpu(), logits, rtol=1e-4, atol=1e-4)
    assert actual["loss"] == pytest.approx(loss, rel=1e-5)
    for name, expected in gradients.items():
        torch.testing.assert_close(actual["gradients"][name].cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_on_the_gpu_equal_adamw_on_the_cpu(gpu, stage):
    state, batches, losses, norms, _ = _expected()
    config = _config(parallel={"zero_stage": stage})
    actual = gpu.run(tasks.train_steps, config, state, batches)[0]
    assert_losses_and_norms(actual, losses, norms, times=10)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32(gpu, precision):
    """The losses stay within 2 % of fp32's.

    Weights and activations are rounded to 8 bits (bf16) or 11 bits (fp16).
    """
    state, batches, losses, *_ = _expected()
    config = _config(train={"precision": precision}, optimizer={"initial_loss_scale_power": 12})
    actual = gpu.run(tasks.train_steps, config, state, batches)[0]
    assert actual["losses"] == pytest.approx(losses, rel=2e-2)
