"""The learning rate against Megatron's own scheduler, and hand numbers."""

import math
import random

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pretrain.config import RunConfig, load_config, parse_config
from pretrain.optim.optimizers import learning_rate

# Relative to the peak of 1: a dozen double-precision operations, 1e-16 each.
ROUND_OFF = 1e-12


def make_config(
    style: str,
    steps: int,
    warmup: int = 0,
    minimum: float = 0.0,
    decay: int = 0,
    first: float = 0.0,
) -> RunConfig:
    schedule = {"lr_decay_style": style, "lr_warmup_steps": warmup, "min_learning_rate": minimum}
    return parse_config(
        {
            "run": {"directory": "runs/test"},
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
            "batch": {"micro_batch_size": 1, "global_batch_size": 1},
            "data": {"directory": "data", "source": "shakespeare", "sequence_length": 8},
            "optimizer": {"learning_rate": 1.0},
            "schedule": {**schedule, "lr_wsd_decay_steps": decay, "lr_warmup_init": first},
            "train": {"num_steps": steps},
        },
        "test",
    )


def rates(config: RunConfig) -> list[float]:
    first = config.schedule.lr_begin_step
    return [learning_rate(config, step) for step in range(first, config.train.num_steps)]


def stepped(make_scheduler, steps: int, *increment: int) -> list[float]:
    """The rate of every update of an optimizer whose scheduler is stepped after each update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, result = make_scheduler(optimizer), []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*increment)
    return result


def megatron_rates(config: RunConfig) -> list[float]:
    """The rates of Megatron's training loop: train_step calls step(samples) after each update."""
    schedule, batch = config.schedule, 8
    decay, steps = (
        end - schedule.lr_begin_step for end in (config.lr_end_step, config.train.num_steps)
    )

    def make(optimizer):
        return OptimizerParamScheduler(
            optimizer,
            init_lr=schedule.lr_warmup_init,
            max_lr=config.optimizer.learning_rate,
            min_lr=schedule.min_learning_rate,
            lr_warmup_steps=schedule.lr_warmup_steps * batch,
            lr_decay_steps=decay * batch,
            lr_decay_style=MEGATRONS.get(schedule.lr_decay_style, schedule.lr_decay_style),
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=steps * batch,
            wd_incr_style="constant",
            wsd_decay_steps=schedule.lr_wsd_decay_steps * batch,
            lr_wsd_decay_style="linear",
        )

    return stepped(make, steps, batch)


def random_config(style: str, generator: random.Random) -> RunConfig:
    """Any schedule that the rules allow, with its borders more often than chance has them."""
    steps = generator.choice([1, 2, 3, generator.randint(4, 300)])
    warmup = generator.choice([0, 0, min(1, steps - 1), steps - 1, generator.randint(0, steps - 1)])
    decay = 0
    if style == "warmup_stable_decay":
        decay = generator.choice([1, steps - warmup, generator.randint(1, steps - warmup)])
    minimum = generator.choice([0.0, 1.0, generator.random()])
    first = generator.choice([0.0, 1e-7, generator.random()]) if warmup else 0.0
    config = make_config(style, steps, warmup, minimum, decay, first)
    # It may begin after some steps, as in a phase, and the run may end before it or go on.
    begin = generator.choice([0, generator.randint(1, 50)])
    ends = {"lr_begin_step": begin, "lr_end_step": begin + steps}
    last = begin + max(1, steps + generator.choice([0, generator.randint(-20, 20)]))
    sections = {
        "schedule": config.schedule.model_copy(update=ends),
        "train": config.train.model_copy(update={"num_steps": last}),
    }
    return config.model_copy(update=sections)


MEGATRONS = {"warmup_stable_decay": "WSD"}


@pytest.mark.parametrize("style", ("linear", "cosine", "constant", "warmup_stable_decay"))
def test_the_rates_are_those_of_megatrons_scheduler(style):
    generator = random.Random(style)
    for _ in range(100):
        config = random_config(style, generator)
        assert rates(config) == pytest.approx(
            megatron_rates(config), rel=ROUND_OFF, abs=ROUND_OFF
        ), (config.schedule, config.train.num_steps)


def fairseq_rate(updates: int) -> float:
    """fairseq's cosine with the arguments of the published runs of WikiText-103, closed form.

    --lr 1.0 --warmup-updates 16000 --warmup-init-lr 1e-07 --min-lr 0.0001 --lr-period-updates
    270000 --t-mult 2 --lr-shrink 0.75, after `updates` updates (fairseq/optim/lr_scheduler/
    cosine_lr_scheduler.py). Period i is 2^i times as long as the first, and begins where the
    2^i - 1 periods' worth of steps before it end.
    """
    peak, minimum, warmup, first, period = 1.0, 1e-4, 16_000, 1e-7, 270_000
    if updates < warmup:
        return first + updates * (peak - first) / warmup
    done, i = updates - warmup, 0
    while done >= 2**i * period:
        done, i = done - 2**i * period, i + 1
    share = (1 + math.cos(math.pi * done / (2**i * period))) / 2
    return 0.75**i * (minimum + (peak - minimum) * share)


def test_the_published_schedule_of_wikitext_103_is_one_period_of_ours():
    """All updates of the warm-up's two ends, and every 97th; the restart would be after them."""
    config = load_config("configs/wikitext103/alibi_512.toml")
    steps = config.train.num_steps
    some = sorted({*range(100), *range(15_900, 16_100), *range(0, steps, 97), steps - 1})
    rates = {step: learning_rate(config, step) for step in some}
    assert rates == pytest.approx({n: fairseq_rate(n) for n in some}, rel=1e-12, abs=0)
    assert (steps, rates[0], max(rates.values())) == (286_000, 1e-7, rates[16_000])
    assert fairseq_rate(steps) == 0.75, "the second period begins where the run ends"
