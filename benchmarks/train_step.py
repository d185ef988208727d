"""The framework's training step beside a plain-torch loop over the dense reference of the same sizes, on one process.

    python -W ignore -m benchmarks.train_step [CONFIG [STEPS [KEY.PATH=VALUE ...]]]

Both take turns, step by step, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from pretrain import platform
from pretrain.config import load_config, num_parameters
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import initialize
from pretrain.train.step import average_loss, forward_backward
from tests.reference.dense_gpt import DenseGPT, is_decayed

path = sys.argv[1] if len(sys.argv) > 1 else "configs/demo.toml"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
config = load_config(path, sys.argv[3:])
topology = initialize(config)
chunks = build_model(config)
optimizer = ZeroOptimizer(config, topology, chunks)

dense = DenseGPT(config).to(platform.device())
named = list(dense.named_parameters())
groups = [
    {
        "params": [p for n, p in named if is_decayed(n, p)],
        "weight_decay": config.optimizer.weight_decay,
    },
    {"params": [p for n, p in named if not is_decayed(n, p)], "weight_decay": 0.0},
]
adam = torch.optim.AdamW(groups, lr=config.optimizer.learning_rate)
shape = (config.batch.global_batch_size, config.data.sequence_length + 1)


def ours(tokens: torch.Tensor) -> None:
    losses = forward_backward(chunks, optimizer, list(tokens.split(config.batch.micro_batch_size)))
    optimizer.step(config.optimizer.learning_rate)
    average_loss(losses, topology)


def plain(tokens: torch.Tensor) -> None:
    parts = tokens.to(platform.device()).split(config.batch.micro_batch_size)
    for part in parts:
        (dense.loss(part) / len(parts)).backward()
    torch.nn.utils.clip_grad_norm_(dense.parameters(), config.optimizer.clip_grad)
    adam.step()
    adam.zero_grad()


times: dict[str, list[float]] = {"framework": [], "plain torch": []}
for number in range(steps + 3):
    tokens = torch.randint(0, config.data.vocab_size, shape)
    for name, step in (("framework", ours), ("plain torch", plain)):
        platform.synchronize()
        begin = time.perf_counter()
        step(tokens)
        platform.synchronize()
        if number >= 3:
            times[name].append(time.perf_counter() - begin)
rates = {name: config.tokens_per_step / statistics.median(t) for name, t in times.items()}
print(
    f"{num_parameters(config):,} parameters, {config.position.method}, L = {config.data.sequence_length}, {steps} steps, "
    f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.device_name()}"
)
for name, rate in rates.items():
    print(f"{name:<14}{rate:>12,.0f} tokens/s")
print(
    f"the framework takes {rates['plain torch'] / rates['framework'] - 1:+.1%} of plain torch's time on top"
)
