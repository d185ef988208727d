"""Use ALiBi attention in a torch model of your own: copying, trained at 32 tokens, tested at 128.

python examples/attention.py [STEPS]
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import pretrain

VOCABULARY, PERIOD = 32, 8


class Block(nn.Module):
    """One pre-norm transformer block whose attention adds -slope * distance to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        # The published slopes of a power of two of heads: 2^(-8/H), 2^(-16/H), ...
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, x_BSE: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x_BSE)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, width / heads]
        attended = pretrain.attention(q, k, v, slopes=self.slopes)
        x_BSE = x_BSE + self.out(attended.transpose(1, 2).flatten(2))
        return x_BSE + self.mlp(self.norms[1](x_BSE))


def batch(rows: int, length: int) -> Tensor:
    """Return rows of random tokens that repeat with a period, [rows, length + 1]."""
    words = torch.randint(VOCABULARY, (rows, PERIOD))
    return words.repeat(1, -(-(length + 1) // PERIOD))[:, : length + 1]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss after the first two periods, where copying can know the next token."""
    logits = model(ids[:, :-1])[:, 2 * PERIOD :]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1 + 2 * PERIOD :].flatten())


def main(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 64), Block(64, 8), Block(64, 8), nn.Linear(64, VOCABULARY)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        found = loss(model, batch(32, 32))
        found.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}  loss {found.item():.3f}")
    for length in (32, 64, 128):
        with torch.no_grad():
            print(f"tested at {length:3}: loss {loss(model, batch(64, length)).item():.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
