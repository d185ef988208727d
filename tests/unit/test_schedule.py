"""The learning rate against hand numbers and torch's own schedulers."""

from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from pretrain.config import RunConfig, parse_config
from pretrain.optim.schedule import learning_rate

# Relative: a dozen double-precision operations. torch multiplies factors step by step, 1e-16 each.
ROUND_OFF = 1e-12


def make_config(
    style: str, steps: int, warmup: int = 0, minimum: float = 0.0, decay: int = 0
) -> RunConfig:
    schedule = {"lr_decay_style": style, "lr_warmup_steps": warmup, "min_learning_rate": minimum}
    return parse_config(
        {
            "run": {"directory": "runs/test"},
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
            "batch": {"micro_batch_size": 1, "global_batch_size": 1},
            "data": {"directory": "data", "source": "shakespeare", "sequence_length": 8},
            "optimizer": {"learning_rate": 1.0},
            "schedule": {**schedule, "lr_wsd_decay_steps": decay},
            "train": {"num_steps": steps},
        },
        "test",
    )


def rates(config: RunConfig) -> list[float]:
    return [learning_rate(config, step) for step in range(config.train.num_steps)]


def torch_rates(make_scheduler, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (make_config("linear", 9, warmup=4), [0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        (make_config("linear", 5, minimum=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (make_config("constant", 5, warmup=2), [0.5, 1, 1, 1, 1]),
        (
            make_config("cosine", 5, warmup=1, minimum=0.5),
            [1, 0.75 + 2**0.5 / 8, 0.75, 0.75 - 2**0.5 / 8, 0.5],
        ),
        (
            make_config("warmup_stable_decay", 8, warmup=2, decay=4),
            [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0],
        ),
        (make_config("warmup_stable_decay", 4, decay=4, minimum=0.2), [0.8, 0.6, 0.4, 0.2]),
        (make_config("warmup_stable_decay", 6, warmup=2, decay=4), [0.5, 1, 0.75, 0.5, 0.25, 0]),
        (make_config("linear", 3, warmup=2), [0.5, 1, 0]),
        (make_config("linear", 1), [1]),
    ],
    ids=lambda value: value.schedule.lr_decay_style if isinstance(value, RunConfig) else "",
)
def test_hand_numbers(config, expected):
    assert rates(config) == pytest.approx(expected, rel=ROUND_OFF, abs=ROUND_OFF)


@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_cosine_equals_torch(minimum):
    expected = torch_rates(lambda o: CosineAnnealingLR(o, T_max=49, eta_min=minimum), 50)
    assert rates(make_config("cosine", 50, minimum=minimum)) == pytest.approx(
        expected, rel=ROUND_OFF, abs=ROUND_OFF
    )


def test_linear_equals_torch():
    expected = torch_rates(
        lambda o: LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=49), 50
    )
    assert rates(make_config("linear", 50, minimum=0.1)) == pytest.approx(expected, rel=ROUND_OFF)


def test_warm_up_equals_torch():
    expected = torch_rates(
        lambda o: LinearLR(o, start_factor=0.1, end_factor=1.0, total_iters=9), 20
    )
    assert rates(make_config("constant", 20, warmup=10)) == pytest.approx(expected, rel=ROUND_OFF)


@pytest.mark.parametrize("style", ["linear", "cosine", "warmup_stable_decay"])
def test_the_last_step_takes_the_minimum_and_the_peak_is_reached_once_warm(style):
    config = make_config(
        style, 600, warmup=50, minimum=0.05, decay=100 if style == "warmup_stable_decay" else 0
    )
    values = rates(config)
    assert values[-1] == pytest.approx(0.05, rel=ROUND_OFF)
    assert values.index(max(values)) == 49 and values[49] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(values[49:]))
