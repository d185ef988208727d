"""Compare the framework's training step with a plain-torch loop over a model of the same sizes.

    python -W ignore -m benchmarks.train_step [--host] [CONFIG [STEPS [KEY.PATH=VALUE ...]]]

This shows what Megatron, DeepSpeed and the code around them cost on one process. The plain loop is
what one would write without a framework: `nn.Module`s, `scaled_dot_product_attention`, AdamW. Both
take turns, step by step, so that whatever else the machine does affects both alike.

At bf16 both compute in bf16 and update fp32 weights: the framework updates its masters and copies
them, the plain loop runs under torch.autocast, which is what one would write, and which casts every
weight in every micro batch.

With --host both forward and backward passes are timed alone, gradients added up, by the processor
time of this process, in one thread. With tensors so small that arithmetic is free, that is what the
host spends on a micro batch, which on a GPU hides behind the device or does not:

    python -W ignore -m benchmarks.train_step --host configs/demo.toml 12 model.num_layers=25
        model.hidden_size=32 model.num_attention_heads=4 data.sequence_length=16
        data.vocab_size=512 evaluation.lengths=[16] evaluation.stride=8
        batch.micro_batch_size=1 batch.global_batch_size=8
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import rounds, summary, timed
from pretrain import platform
from pretrain.bench.timing import TrainingStep
from pretrain.config import ConfigError, RunConfig, load_config, num_parameters
from pretrain.topology import initialize

WARM_UP_STEPS = 3
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
Step = Callable[[Tensor], None]
"""One optimizer step on token ids [global batch, S + 1]."""


class PlainBlock(nn.Module):
    """One pre-LayerNorm decoder layer."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        m = config.model
        hidden, bias, eps = m.hidden_size, m.use_bias, m.layernorm_epsilon
        self.heads, self.groups = m.num_attention_heads, config.num_query_groups
        self.head_dim = config.head_dim
        inner = self.heads * self.head_dim
        self.widths = [inner, self.groups * self.head_dim, self.groups * self.head_dim]
        self.activation = ACTIVATIONS[m.hidden_act]
        self.attention_norm = nn.LayerNorm(hidden, eps, bias=bias)
        self.qkv = nn.Linear(hidden, sum(self.widths), bias=bias)
        self.projection = nn.Linear(inner, hidden, bias=bias)
        self.mlp_norm = nn.LayerNorm(hidden, eps, bias=bias)
        self.up = nn.Linear(hidden, config.ffn_hidden_size, bias=bias)
        self.down = nn.Linear(config.ffn_hidden_size, hidden, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map activations [B, S, hidden] to the next layer's, given the ALiBi mask [1, H, S, S]."""
        parts = self.qkv(self.attention_norm(x)).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.to(q.dtype), enable_gqa=self.groups != self.heads
        )
        x = x + self.projection(out.transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(self.activation(self.up(self.mlp_norm(x))))
        return x + mlp


class PlainGPT(nn.Module):
    """A decoder of the config's sizes in plain torch, with ALiBi."""

    mask: Tensor

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        m = config.model
        self.embedding = nn.Embedding(config.padded_vocab_size, m.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(m.num_layers))
        self.norm = nn.LayerNorm(m.hidden_size, m.layernorm_epsilon, bias=m.use_bias)
        self.output = nn.Linear(m.hidden_size, config.padded_vocab_size, bias=False)
        if m.tie_word_embeddings:
            self.output.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=m.init_method_std)
        position = torch.arange(config.data.sequence_length)
        distance = position[:, None] - position
        slopes = torch.tensor(config.position.head_slopes(config))
        bias = -slopes[:, None, None] * distance
        # One mask serves all layers and steps; making it is not part of the time.
        self.register_buffer("mask", bias.masked_fill(distance < 0, -torch.inf)[None])

    def loss(self, ids: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of predicting each token of ids [B, S + 1]."""
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def plain_step(config: RunConfig, updates: bool = True) -> Step:
    """Build the plain model and AdamW and return their training step, or its passes alone."""
    model = PlainGPT(config).to(platform.device())
    # Weight decay on matrices only, as in the framework.
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=config.optimizer.learning_rate)
    autocast = torch.autocast(
        platform.device().type, torch.bfloat16, enabled=config.train.precision == "bf16"
    )

    def step(tokens: Tensor) -> None:
        batches = torch.split(tokens.to(platform.device()), config.batch.micro_batch_size)
        for batch in batches:
            with autocast:
                loss = model.loss(batch) / len(batches)
            torch.autograd.backward(loss)
        if updates:
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
            adam.step()
        adam.zero_grad()

    return step


def check(config: RunConfig) -> None:
    """Raise ConfigError if the plain model does not compute what the config asks for."""
    if config.position.head_slopes(config) is None or config.position.tensors(config):
        raise ConfigError("benchmarks.train_step compares models with fixed ALiBi slopes only")
    if config.model.hidden_dropout or config.model.attention_dropout:
        raise ConfigError("benchmarks.train_step compares models without dropout only")
    if config.train.precision == "fp16":
        raise ConfigError("train.precision = fp16: benchmarks.train_step takes fp32 and bf16")


def measure(config: RunConfig, num_steps: int, is_host: bool = False) -> dict[str, float]:
    """Let both steps take turns on random tokens.

    Args:
        config: The run.
        num_steps: Steps to count, after WARM_UP_STEPS.
        is_host: Take the processor time of forward and backward passes.

    Returns:
        Tokens per second of each, from the median time of a step.
    """
    shape = (config.batch.global_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(0, config.data.vocab_size, shape)
    framework, plain = TrainingStep(config, initialize(config)), plain_step(config, not is_host)
    # Data, passes and reduction of five parts.
    parts = 3 if is_host else None
    clock = time.process_time if is_host else time.perf_counter
    ways = {
        "framework": timed(lambda: list(itertools.islice(framework.parts(tokens), parts)), clock),
        "plain torch": timed(lambda: plain(tokens), clock),
    }
    found = summary(list(rounds(ways, num_steps, WARM_UP_STEPS)))
    return {row["way"]: 1e3 * config.tokens_per_step / row["ms"] for row in found}


def parse_arguments(arguments: list[str]) -> tuple[RunConfig, int, bool]:
    """Return the config, the number of steps and --host, as the command line has them.

    Raises:
        ConfigError: The config or a setting is wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step")
    parser.add_argument("--host", action="store_true", help="Processor time of the passes alone.")
    parser.add_argument("config", nargs="?", default="configs/demo.toml")
    parser.add_argument("steps", nargs="?", type=int, default=30, help="Steps to count.")
    parser.add_argument("settings", nargs="*", metavar="KEY.PATH=VALUE", help="As in --set.")
    chosen = parser.parse_args(arguments)
    return load_config(chosen.config, chosen.settings), chosen.steps, chosen.host


def main() -> None:
    """Run the comparison and print tokens per second."""
    config, num_steps, is_host = parse_arguments(sys.argv[1:])
    check(config)
    if is_host:
        torch.set_num_threads(1)
    rates = measure(config, num_steps, is_host)
    print(
        f"{num_parameters(config):,} parameters, L = {config.data.sequence_length}, "
        f"{config.train.precision}, {num_steps} steps, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {platform.device_name()}"
    )
    for name, rate in rates.items():
        print(f"{name:<14}{rate:>12,.0f} tokens/s")
    if is_host:
        for name, rate in rates.items():
            tokens = config.batch.micro_batch_size * config.data.sequence_length
            print(f"{name:<14}{1e3 * tokens / rate:>12.2f} processor ms a micro batch")
    overhead = rates["plain torch"] / rates["framework"] - 1
    print(f"a step of the framework takes {overhead:+.1%} more time than one of plain torch")


if __name__ == "__main__":
    main()
