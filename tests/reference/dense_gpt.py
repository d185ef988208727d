"""Implement the model a second time, in plain torch on one process.

Every sharded layout must give the same results. The implementation follows the equations, so that
it can be checked by reading, and uses nothing of Megatron, `pretrain.kernels` or `pretrain.model`.
Attention is a matrix of scores, a softmax and a product; nothing is fused. The model runs in the
data type and on the device of its parameters, so `.double()` works.

Shapes: B batch, S tokens, H heads, G query groups, D size of a head, V padded vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import RunConfig
from tests.conftest import tiny_config
from tests.reference.content import CONTENT
from tests.reference.nag import FairseqNAG
from tests.reference.positions import ORACLES

ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": lambda x: x * torch.sigmoid(x),
}


def make_config(method: str = "alibi", **changes: object) -> RunConfig:
    """Return the config of a two-layer model.

    `changes` go into [model], those named position_* into [position].
    """
    model = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 12,
        "ffn_hidden_size": None,
        "make_vocab_size_divisible_by": 32,
    }
    position: dict[str, object] = {"method": method}
    for key, value in changes.items():
        section = position if key.startswith("position_") else model
        section[key.removeprefix("position_")] = value
    data = {"vocab_size": 500, "sequence_length": 64}
    lengths = {"lengths": None}
    return tiny_config(model=model, position=position, data=data, evaluation=lengths)


class DenseGPT(nn.Module):
    """A pre-LN decoder.

    `dict(model.named_parameters())` has the global names and full shapes of a checkpoint.
    """

    activation_masks: Sequence[Tensor] | None = None
    """model.activation_dropout: what each layer's activations are multiplied with, [B, S, ffn]: 0
    where an element is dropped, else 1 / (1 - p). None: nothing is dropped."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        for name, value in random_state(config, config.run.seed).items():
            _register(self, name, nn.Parameter(value))

    def load_global_state(self, state: dict[str, Tensor]) -> DenseGPT:
        """Copy full tensors in by global name, and return the model.

        Names and shapes must be exactly the model's own.
        """
        self.load_state_dict(state, strict=True)
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [B, S, V] of token ids [B, S]; log p of an adaptive softmax."""
        c, p = self.config, dict(self.named_parameters())
        x = self._embed(ids, p)
        for i in range(c.model.num_layers):
            layer = f"decoder.layers.{i}"
            model, own = self._with_positions_of(i, p)
            attended = x + model._attention(
                self._norm(x, p, f"{layer}.input_layernorm"),
                model._score_bias(ids.shape[1], own, x),
                own,
                f"{layer}.self_attention",
            )
            mlp_input = x if c.model.parallel_residual else attended
            hidden = _linear(
                self._norm(mlp_input, p, f"{layer}.pre_mlp_layernorm"), p, f"{layer}.mlp.linear_fc1"
            )
            x = attended
            if c.model.gated_linear_unit:
                gate, up = hidden.tensor_split(2, dim=-1)
                inner = ACTIVATIONS[c.model.hidden_act](gate) * up
            else:
                inner = ACTIVATIONS[c.model.hidden_act](hidden)
            if self.activation_masks is not None:
                inner = inner * self.activation_masks[i]
            x = x + _linear(inner, p, f"{layer}.mlp.linear_fc2")
        if c.model.final_layernorm:
            x = self._norm(x, p, "decoder.final_layernorm")
        if c.model.adaptive_cutoffs is not None:
            return self._adaptive_log_probabilities(x, p)
        output = (
            "embedding.word_embeddings.weight"
            if c.model.tie_word_embeddings
            else "output_layer.weight"
        )
        return x @ p[output].T

    def _with_positions_of(
        self, layer: int, p: dict[str, Tensor]
    ) -> tuple[DenseGPT, dict[str, Tensor]]:
        """Return a model with the method of one layer of a hybrid, and parameters by its names."""
        if self.config.position.method != "hybrid":
            return self, p
        entries = self.config.position.layers
        number = layer % len(entries)
        model = copy.copy(self)
        model.config = self.config.model_copy(update={"position": entries[number]})
        return model, {name.replace(f".layers_{number}_", "."): x for name, x in p.items()}

    def loss(self, ids: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting ids[:, 1:] from ids[:, :-1].

        `ids` are token ids [B, S + 1].
        """
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def _adaptive_log_probabilities(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        """Return log p of every word (Grave et al. 2017): log p(cluster) + log p(word | it)."""
        cutoffs = self.config.model.adaptive_cutoffs or ()
        tied = self.config.model.tie_word_embeddings
        module = "embedding.word_embeddings" if tied else "output_layer"
        head = torch.cat([p[f"{module}.embedding_0"], p["output_layer.tails"]])
        log_p = torch.log_softmax(x @ head.T, dim=-1)
        parts = [log_p[..., : cutoffs[0]]]
        for i in range(1, len(cutoffs) + 1):
            narrow = x @ p[f"{module}.projection_{i}"]
            within = torch.log_softmax(narrow @ p[f"{module}.embedding_{i}"].T, dim=-1)
            parts.append(log_p[..., [cutoffs[0] + i - 1]] + within)
        return torch.cat(parts, dim=-1)

    def _word_embeddings(self, ids: Tensor, p: dict[str, Tensor]) -> Tensor:
        name = "embedding.word_embeddings"
        if self.config.model.adaptive_cutoffs is None:
            return p[f"{name}.weight"][ids]
        # All words, each with the projection of its cluster (Baevski and Auli 2019).
        clusters = range(len(self.config.model.adaptive_cutoffs) + 1)
        words = [p[f"{name}.embedding_{i}"] @ p[f"{name}.projection_{i}"].T for i in clusters]
        return torch.cat(words)[ids]

    def masked_loss(self, inputs: Tensor, ids: Tensor, chosen: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting the chosen tokens of ids.

        `inputs`, `ids` and `chosen` are [B, S].
        """
        return F.cross_entropy(self(inputs)[chosen], ids[chosen])

    def _embed(self, ids: Tensor, p: dict[str, Tensor]) -> Tensor:
        x = self._word_embeddings(ids, p)
        if self.config.model.embedding_layernorm:
            x = self._norm(x, p, "embedding.word_embeddings_layernorm")
        # Fixed by hand, not read from the property under test: 1 behind a LayerNorm.
        scale = self.config.model.embedding_scale
        if scale == "auto":
            scale = 1.0 if self.config.model.embedding_layernorm else math.sqrt(x.shape[-1])
        x = x * scale
        if self.config.position.method == "learned":
            x = x + p["embedding.position_embeddings.weight"][: ids.shape[1]]
        if self.config.position.method == "sinusoidal":
            form = self.config.position.sinusoidal_table
            x = x + sinusoids(ids.shape[1], x.shape[-1], form).to(x)
        return x

    def _score_bias(self, length: int, p: dict[str, Tensor], like: Tensor) -> Tensor:
        """Return what is added to the scaled scores, [H or 1, S, S].

        This is the position method's term, and -inf above the diagonal (the causal mask). A model
        that predicts masked tokens has no such mask, and ALiBi's term is symmetric.

        Args:
            length: S.
            p: Parameters by global name.
            like: A tensor of the data type and device to use.
        """
        c = self.config
        position = torch.arange(length, device=like.device)
        # distance[i, j] = i - j for query i and key j.
        distance = position[:, None] - position[None, :]
        bias = like.new_zeros(1, length, length)
        if c.position.method == "alibi":
            keys = ["slopes", "slopes" if c.position.slopes_right is None else "slopes_right"]
            left, right = (
                p[f"position.{key}"] if c.position.trainable_slopes else chosen_slopes(c, key)
                for key in keys
            )
            slopes = torch.where(distance > 0, left[:, None, None], right[:, None, None])
            bias = -slopes.to(like) * distance.abs().to(like)
        if c.position.method == "t5":
            table = p["position.relative_attention_bias"]
            furthest = c.position.relative_attention_max_distance
            if c.train.objective == "masked":
                # The second half of the buckets is for keys after the query.
                half = table.shape[1] // 2
                buckets = t5_buckets(distance.abs(), half, furthest) + half * (distance < 0)
            else:
                buckets = t5_buckets(distance, table.shape[1], furthest)
            bias = table[:, buckets]
        if c.train.objective == "masked":
            return bias
        return bias.masked_fill(distance < 0, -math.inf)

    def _attention(self, x: Tensor, bias: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        c = self.config
        B, S, _ = x.shape
        H, G, D = c.model.num_attention_heads, c.num_query_groups, c.head_dim
        # Megatron's layout of the fused projection: for each group its H/G query heads, then its
        # key, then its value.
        fused = _linear(x, p, f"{name}.linear_qkv").view(B, S, G, H // G + 2, D)
        if (most := c.model.clip_qkv) is not None:
            fused = torch.where(fused.abs() > most, most * fused.detach().sign(), fused)
        q = fused[:, :, :, : H // G].reshape(B, S, H, D).transpose(1, 2)  # [B, H, S, D]
        k = fused[:, :, :, H // G].repeat_interleave(H // G, dim=2).transpose(1, 2)
        v = fused[:, :, :, H // G + 1].repeat_interleave(H // G, dim=2).transpose(1, 2)
        if c.model.qk_layernorm:
            q = self._norm(q, p, f"{name}.q_layernorm")
            k = self._norm(k, p, f"{name}.k_layernorm")
        if c.position.method == "rotary":
            n = round(c.position.rotary_percent * D)
            turned = rotary_table(c, n)
            q = torch.cat([rotate(q[..., :n], *turned), q[..., n:]], dim=-1)
            k = torch.cat([rotate(k[..., :n], *turned), k[..., n:]], dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        own = {n.removeprefix("position."): x for n, x in p.items()}
        if (oracle := ORACLES.get(c.position.method)) is not None:
            scores = oracle(scores, c, own)
        if (content := CONTENT.get(c.position.method)) is not None:
            layer = int(name.split(".")[2])
            scores = content.products(q, k, c, own, layer) / math.sqrt(D)
        scores = scores + bias
        out = torch.softmax(scores, dim=-1) @ v
        return _linear(out.transpose(1, 2).reshape(B, S, H * D), p, f"{name}.linear_proj")

    def _norm(self, x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
        eps = self.config.model.layernorm_epsilon
        if self.config.model.normalization == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"]
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p.get(f"{name}.bias"), eps)


def chosen_slopes(c: RunConfig, key: str = "slopes") -> Tensor:
    """Return the slopes of a key of [position], as they are rounded to fp32, in fp64 [H]."""
    slopes, heads = getattr(c.position, key), c.model.num_attention_heads
    if hasattr(slopes, "factor"):
        # NTK-ALiBi's formula, m_h = 1 / (2^(8 h / H) a^((h - 1) / (H - 1))), h = 1..H.
        powers = torch.arange(heads) / (heads - 1) if slopes.by_head else torch.ones(heads)
        return alibi_slopes(heads) * (1 / slopes.factor) ** -powers.double()
    if slopes == "published" or hasattr(slopes, "bias_max"):
        # 2^(-b x) is (2^(-8 x))^(b / 8).
        return alibi_slopes(heads) ** (getattr(slopes, "bias_max", 8) / 8)
    if not isinstance(slopes, tuple):
        ratio = (slopes.last / slopes.first) ** (1 / max(heads - 1, 1))
        slopes = tuple(slopes.first * ratio**head for head in range(heads))
    return torch.tensor(slopes).float().double()


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's slopes, fp64 [H].

    For a power of two these are 2^(-8 (h + 1) / H). Otherwise they are the slopes of the next lower
    power of two, followed by every second slope of twice that many heads (Press et al. 2022, and
    the authors' code).
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float64)


def sinusoids(length: int, hidden: int, form: str = "fairseq") -> Tensor:
    """Return the table of sinusoidal positions, fp64 [length, hidden].

    The first half of the channels are sines and the second half cosines. The angles are those of
    fairseq, (position + 2) 10000^(-k / (hidden / 2 - 1)), or of Vaswani et al. 2017,
    position 10000^(-k / (hidden / 2)).
    """
    first, steps = (2, hidden // 2 - 1) if form == "fairseq" else (0, hidden // 2)
    frequency = 10_000.0 ** (-torch.arange(hidden // 2, dtype=torch.float64) / max(steps, 1))
    angle = torch.arange(first, first + length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def rotary_table(c: RunConfig, channels: int) -> tuple[Tensor, float]:
    """Return the angles per token, fp64 [channels / 2], and the factor on what is rotated.

    Those of position.rotary_scaling come from transformers. It has no static NTK-aware base; its
    dynamic one with a factor of 1 is the same at factor x the original length.
    """
    base, scaling = c.position.rotary_base, c.position.rotary_scaling
    if scaling is None:
        return base ** (-torch.arange(channels // 2, dtype=torch.float64) / (channels // 2)), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    keys, length = scaling.model_dump(exclude_none=True), 64
    kind, seconds = keys.pop("type"), {}
    if kind == "ntk":
        kind, seconds = "dynamic", {"seq_len": keys["factor"] * length}
        keys["factor"] = 1.0
    keys |= {"rope_type": kind, "rope_theta": base}
    theirs = LlamaConfig(head_dim=channels, max_position_embeddings=length, rope_parameters=keys)
    table, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", **seconds)
    return table.double(), factor


def rotate(x: Tensor, frequency: Tensor, factor: float) -> Tensor:
    """Apply rotary embeddings over all of D to x [B, H, S, D] (Su et al. 2021).

    Channel k is paired with channel k + D/2, as in GPT-NeoX.

    Args:
        x: [B, H, S, D].
        frequency: Angles per token, [D / 2].
        factor: On cosines and sines.
    """
    S, D = x.shape[-2:]
    # [S, D / 2]
    angle = torch.arange(S, dtype=torch.float64)[:, None] * frequency
    cos, sin = (factor * angle.cos()).to(x), (factor * angle.sin()).to(x)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return T5's unidirectional buckets of distances i - j, same shape (Raffel et al. 2020).

    Each bucket of the first half holds one distance. Those of the second half widen logarithmically
    up to `max_distance`; the last one also holds everything beyond.

    Args:
        distance: Distances of query and key. Those below 0 get bucket 0; they are masked elsewhere.
        num_buckets: Number of buckets.
        max_distance: Distance from which on all share the last bucket.
    """
    distance = distance.clamp(min=0)
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    grown = exact + (share * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, grown.clamp(max=num_buckets - 1))


def parameter_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every parameter by global name."""
    m, h, vocabulary = config.model, config.model.hidden_size, config.padded_vocab_size
    inner, ffn = m.num_attention_heads * config.head_dim, config.ffn_hidden_size
    fused = inner + 2 * config.num_query_groups * config.head_dim
    norm_bias = m.use_bias and m.normalization == "layernorm"
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, h)}
    if m.adaptive_cutoffs is not None:
        shapes = adaptive_shapes(config)
    if config.position.method == "learned":
        shapes["embedding.position_embeddings.weight"] = (config.position.table_end(config), h)
    if m.embedding_layernorm:
        shapes["embedding.word_embeddings_layernorm.weight"] = (h,)
        if norm_bias:
            shapes["embedding.word_embeddings_layernorm.bias"] = (h,)
    for i in range(m.num_layers):
        weights = {
            "input_layernorm": (h,),
            "self_attention.linear_qkv": (fused, h),
            "self_attention.linear_proj": (h, inner),
            "pre_mlp_layernorm": (h,),
            "mlp.linear_fc1": (2 * ffn if m.gated_linear_unit else ffn, h),
            "mlp.linear_fc2": (h, ffn),
        }
        if m.qk_layernorm:
            weights |= {f"self_attention.{each}_layernorm": (config.head_dim,) for each in "qk"}
        shapes |= {f"decoder.layers.{i}.{name}.weight": shape for name, shape in weights.items()}
        for name, shape in weights.items():
            has_bias = norm_bias if name.endswith("layernorm") else m.use_bias
            if has_bias or (m.add_qkv_bias and name.endswith("qkv")):
                shapes[f"decoder.layers.{i}.{name}.bias"] = shape[:1]
    if m.final_layernorm:
        shapes["decoder.final_layernorm.weight"] = (h,)
        if norm_bias:
            shapes["decoder.final_layernorm.bias"] = (h,)
    if not m.tie_word_embeddings and m.adaptive_cutoffs is None:
        shapes["output_layer.weight"] = (vocabulary, h)
    own = config.position.tensors(config).items()
    shapes |= {name: shape for name, shape in own if name.startswith("position.")}
    return shapes


def adaptive_shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adaptive inputs and of the adaptive softmax."""
    m, shapes = config.model, {}
    cutoffs = m.adaptive_cutoffs or ()
    bounds = [0, *cutoffs, config.padded_vocab_size]
    modules = ["embedding.word_embeddings"] + ["output_layer"] * (not m.tie_word_embeddings)
    for module in modules:
        for i in range(len(cutoffs) + 1):
            width = m.hidden_size // m.adaptive_factor**i
            shapes[f"{module}.embedding_{i}"] = (bounds[i + 1] - bounds[i], width)
            if i or module != "output_layer":
                shapes[f"{module}.projection_{i}"] = (m.hidden_size, width)
    return {**shapes, "output_layer.tails": (len(cutoffs), m.hidden_size)}


def random_state(config: RunConfig, seed: int) -> dict[str, Tensor]:
    """Return random full fp32 weights by global name.

    They are large enough that no gradient is close to zero, where an error would go unnoticed. All
    are noise of standard deviation 0.08, around 1 for LayerNorm weights. The learned score bias has
    standard deviation 0.5, and slopes deviate from the fixed ones by some 8 %, as other parameters
    of a position method from their initial values.
    """
    given = config.position.initial_values(config)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(config).items():
        noise = 0.08 * torch.randn(shape, generator=generator)
        if name.endswith("layernorm.weight"):
            noise = 1 + noise
        elif name.endswith("relative_attention_bias"):
            noise = noise * (0.5 / 0.08)
        elif name.endswith(("slopes", "slopes_right")):
            noise = alibi_slopes(shape[0]).float() * torch.exp(noise)
        elif name in given:
            noise = torch.where(given[name] == 0, 6 * noise, given[name] * torch.exp(-noise.abs()))
        state[name] = noise
    return state


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return True if weight decay applies: to matrices only, except those of a position method."""
    return parameter.ndim >= 2 and not name.startswith("position.")


def learnable_batches(count: int) -> list[Tensor]:
    """Global batches [8, 33] of sequences that each count up by a stride of their own."""
    generator = torch.Generator().manual_seed(13)
    start = torch.randint(0, 500, (count, 8, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 8, 1), generator=generator)
    return list((start + stride * torch.arange(33)) % 500)


def train_dense(
    config: RunConfig,
    state: dict[str, Tensor],
    batches: Iterable[Tensor],
    learning_rates: Sequence[float],
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train with torch's AdamW, or fairseq's NAG, and the values of config.optimizer.

    Args:
        config: The run's config.
        state: The initial weights, full fp32 tensors by global name.
        batches: Token ids of each step, [B, S + 1].
        learning_rates: Learning rate of each step.

    Returns:
        (losses in nats before each step, global gradient norms before clipping, final weights).
    """
    o = config.optimizer
    model = DenseGPT(config).load_global_state(state)
    named = dict(model.named_parameters())
    mult = o.position_learning_rate_mult
    groups = [
        {
            "params": [p],
            "weight_decay": o.weight_decay if is_decayed(name, p) else 0.0,
            "mult": mult if name.startswith("position.") else 1.0,
        }
        for name, p in named.items()
    ]
    optimizer: torch.optim.Optimizer
    if o.name == "nag":
        optimizer = FairseqNAG(groups, o.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    losses, norms = [], []
    for ids, learning_rate in zip(batches, learning_rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["mult"]
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(named.values(), o.clip_grad or math.inf).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, {name: p.detach().clone() for name, p in named.items()}


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, creating the modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(leaf, parameter)


def _linear(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y
