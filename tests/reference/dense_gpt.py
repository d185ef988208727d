"""The whole model once more, in plain torch and on one process: what every sharded layout must equal.

Written to be checked by eye, from the equations, with nothing of Megatron's, of `kernels` or of `pretrain.model`.
Attention is a matrix of scores, a softmax and a product; nothing is fused. It runs in the dtype and on the device of
its parameters (`.double()` works).

Shapes: B batch, S tokens, H heads, G query groups, D width of a head, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import RunConfig

ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


class DenseGPT(nn.Module):
    """A pre-LN decoder. `dict(model.named_parameters())` has exactly the names and full shapes of a checkpoint."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        for name, value in random_state(config, config.run.seed).items():
            _register(self, name, nn.Parameter(value))

    def load_global_state(self, state: dict[str, Tensor]) -> DenseGPT:
        """Copies full tensors in by global name; names and shapes must be exactly this model's. Returns itself."""
        self.load_state_dict(state, strict=True)
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, S] -> logits [B, S, V]."""
        c, p = self.config, dict(self.named_parameters())
        x = self._embed(ids, p)
        bias = self._score_bias(ids.shape[1], p, x)
        for i in range(c.model.num_layers):
            layer = f"decoder.layers.{i}"
            x = x + self._attention(
                self._norm(x, p, f"{layer}.input_layernorm"), bias, p, f"{layer}.self_attention"
            )
            hidden = _linear(
                self._norm(x, p, f"{layer}.pre_mlp_layernorm"), p, f"{layer}.mlp.linear_fc1"
            )
            x = x + _linear(ACTIVATIONS[c.model.hidden_act](hidden), p, f"{layer}.mlp.linear_fc2")
        x = self._norm(x, p, "decoder.final_layernorm")
        output = (
            "embedding.word_embeddings.weight"
            if c.model.tie_word_embeddings
            else "output_layer.weight"
        )
        return x @ p[output].T

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy (nats) of predicting ids[:, 1:] from ids[:, :-1], over ids [B, S + 1]."""
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def _embed(self, ids: Tensor, p: dict[str, Tensor]) -> Tensor:
        x = p["embedding.word_embeddings.weight"][ids]
        if self.config.position.method == "learned":
            x = x + p["embedding.position_embeddings.weight"][: ids.shape[1]]
        if self.config.position.method == "sinusoidal":
            x = x * math.sqrt(x.shape[-1]) + sinusoids(ids.shape[1], x.shape[-1]).to(x)
        return x

    def _score_bias(self, length: int, p: dict[str, Tensor], like: Tensor) -> Tensor:
        """Added to the scaled scores, [H or 1, S, S]: the position method's term, and -inf above the diagonal."""
        c = self.config
        position = torch.arange(length, device=like.device)
        distance = (
            position[:, None] - position[None, :]
        )  # of query i (row) and key j (column): i - j
        bias = like.new_zeros(1, length, length)
        if c.position.method == "alibi":
            slopes = (
                p["position.slopes"]
                if c.position.trainable_slopes
                else alibi_slopes(c.model.num_attention_heads)
            )
            bias = -slopes.to(like)[:, None, None] * distance.to(like)
        if c.position.method == "t5":
            table = p["position.relative_attention_bias"]
            bias = table[
                :, t5_buckets(distance, table.shape[1], c.position.relative_attention_max_distance)
            ]
        return bias.masked_fill(distance < 0, -math.inf)

    def _attention(self, x: Tensor, bias: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        c = self.config
        B, S, _ = x.shape
        H, G, D = c.model.num_attention_heads, c.num_query_groups, c.head_dim
        # The fused rows are, for each group: its H/G query heads, then its key, then its value.
        fused = _linear(x, p, f"{name}.linear_qkv").view(B, S, G, H // G + 2, D)
        q = fused[:, :, :, : H // G].reshape(B, S, H, D).transpose(1, 2)  # [B, H, S, D]
        k = fused[:, :, :, H // G].repeat_interleave(H // G, dim=2).transpose(1, 2)
        v = fused[:, :, :, H // G + 1].repeat_interleave(H // G, dim=2).transpose(1, 2)
        if c.position.method == "rotary":
            q, k = rotate(q, c.position.rotary_base), rotate(k, c.position.rotary_base)
        scores = q @ k.transpose(-1, -2) / math.sqrt(D) + bias
        out = torch.softmax(scores, dim=-1) @ v
        return _linear(out.transpose(1, 2).reshape(B, S, H * D), p, f"{name}.linear_proj")

    def _norm(self, x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        eps = self.config.model.layernorm_epsilon
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p.get(f"{name}.bias"), eps)


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes [H], float64. A power of two: 2^(-8(h+1)/H). Else those of the power of two below, then every second one
    of twice as many heads (Press et al. 2022, the authors' code)."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float64)


def sinusoids(length: int, hidden: int) -> Tensor:
    """[length, hidden] float64: first half sines, second half cosines of position x 10000^(-k / (hidden / 2))."""
    frequency = 10_000.0 ** (-torch.arange(hidden // 2, dtype=torch.float64) / (hidden // 2))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def rotate(x: Tensor, base: float) -> Tensor:
    """Turns x [B, H, S, D] by its position over all of D; channel k pairs with k + D/2 (NeoX; Su et al. 2021)."""
    S, D = x.shape[-2:]
    frequency = float(base) ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    angle = torch.arange(S, dtype=torch.float64)[:, None] * frequency  # [S, D / 2]
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance i - j (Raffel et al. 2020, unidirectional), same shape.

    The first half of the buckets hold one distance each, the others grow with the logarithm up to max_distance.
    Distances below 0 are masked elsewhere; they get bucket 0.
    """
    distance = distance.clamp(min=0)
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    grown = exact + (share * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, grown.clamp(max=num_buckets - 1))


def parameter_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> full shape of every parameter."""
    m, h, vocabulary = config.model, config.model.hidden_size, config.padded_vocab_size
    heads, inner, ffn = (
        m.num_attention_heads,
        m.num_attention_heads * config.head_dim,
        config.ffn_hidden_size,
    )
    fused = inner + 2 * config.num_query_groups * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, h)}
    if config.position.method == "learned":
        shapes["embedding.position_embeddings.weight"] = (config.max_position_embeddings, h)
    for i in range(m.num_layers):
        weights = {
            "input_layernorm": (h,),
            "self_attention.linear_qkv": (fused, h),
            "self_attention.linear_proj": (h, inner),
            "pre_mlp_layernorm": (h,),
            "mlp.linear_fc1": (ffn, h),
            "mlp.linear_fc2": (h, ffn),
        }
        shapes |= {f"decoder.layers.{i}.{name}.weight": shape for name, shape in weights.items()}
        if m.use_bias:
            shapes |= {
                f"decoder.layers.{i}.{name}.bias": shape[:1] for name, shape in weights.items()
            }
    shapes["decoder.final_layernorm.weight"] = (h,)
    if m.use_bias:
        shapes["decoder.final_layernorm.bias"] = (h,)
    if not m.tie_word_embeddings:
        shapes["output_layer.weight"] = (vocabulary, h)
    if config.position.method == "t5":
        shapes["position.relative_attention_bias"] = (
            heads,
            config.position.relative_attention_num_buckets,
        )
    if config.position.trainable_slopes:
        shapes["position.slopes"] = (heads,)
    return shapes


def random_state(config: RunConfig, seed: int) -> dict[str, Tensor]:
    """Full fp32 tensors by global name, so large that no gradient is tiny.

    Everything is noise of deviation 0.08, around 1 for LayerNorm weights; the learned score bias has deviation 0.5, and
    slopes lie some 8 % around the fixed ones.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(config).items():
        noise = 0.08 * torch.randn(shape, generator=generator)
        if name.endswith("layernorm.weight"):
            noise = 1 + noise
        elif name == "position.relative_attention_bias":
            noise = noise * (0.5 / 0.08)
        elif name == "position.slopes":
            noise = alibi_slopes(shape[0]).float() * torch.exp(noise)
        state[name] = noise
    return state


def is_decayed(name: str, parameter: Tensor) -> bool:
    """The project's rule, "weight decay on matrices only": two dimensions, but for the learned score bias."""
    return parameter.ndim >= 2 and name != "position.relative_attention_bias"


def train_dense(
    config: RunConfig,
    state: dict[str, Tensor],
    batches: Iterable[Tensor],
    learning_rates: Sequence[float],
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Plain AdamW from `state` with config.optimizer's values: one step per batch (ids [B, S + 1]) and learning rate.

    Returns the losses (nats, before each step), the global gradient norms (before clipping) and the final weights.
    """
    o = config.optimizer
    model = DenseGPT(config).load_global_state(state)
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named.items() if is_decayed(n, p)],
            "weight_decay": o.weight_decay,
        },
        {"params": [p for n, p in named.items() if not is_decayed(n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    losses, norms = [], []
    for ids, learning_rate in zip(batches, learning_rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(named.values(), o.clip_grad or math.inf).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, {name: p.detach().clone() for name, p in named.items()}


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts `parameter` where its dotted name says, making the modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(leaf, parameter)


def _linear(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y
