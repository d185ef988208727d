"""Define the config's keys about the model: [model] and [position]. See `schema`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from pretrain.config.section import AutoOrPositive, Section
from pretrain.config.slopes import Slopes


class ModelSection(Section):
    """[model]: the shape of the GPT (pre-LayerNorm decoder) and its initialisation."""

    num_layers: int = Field(gt=0)
    """Transformer layers. More layers make a larger model, which pipeline stages can split."""

    hidden_size: int = Field(gt=0)
    """Width of the residual stream; a multiple of num_attention_heads."""

    num_attention_heads: int = Field(gt=0)
    """Query heads of each layer. Tensor parallelism splits them, so its size must divide them."""

    num_query_groups: int | None = Field(default=None, gt=0)
    """Key/value heads (grouped-query attention), a divisor of num_attention_heads. Default: one per
    query head. 1 is multi-query attention. Fewer heads make the cache of generation smaller; such a
    model has no export."""

    ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner width of the MLP. Default: 4 x hidden_size."""

    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "relu"] = "gelu"
    """Activation of the MLP by Hugging Face's name: GELU's tanh approximation, exact GELU (erf), or
    ReLU. With gelu and no biases an ALiBi model exports as MPT, which vLLM and transformers compute
    in bf16 and fp16 too; with gelu_pytorch_tanh it exports as Bloom, which stock transformers
    computes in fp32 alone; with relu it has no class."""

    use_bias: bool = False
    """Use biases in every linear layer and LayerNorm, as GPT-2 and Bloom do; false removes all of
    them, as in MPT and PaLM. An ALiBi model with biases exports as Bloom: see hidden_act."""

    tie_word_embeddings: bool = True
    """Use the input embedding as the output layer too; false trains a second matrix of the same
    size."""

    adaptive_cutoffs: tuple[PositiveInt, ...] | None = Field(default=None, strict=False)
    """[20000, 60000]: adaptive inputs and an adaptive softmax, as in Baevski and Auli 2019 and in
    fairseq. Token ids below the first cutoff are the head; the ids from each cutoff to the next one
    are a tail, whose embeddings are narrower. Ids have to be ordered by frequency, as those of
    data.tokenizer = "words" are. With tie_word_embeddings the softmax shares the input's embeddings
    and the projections of its tails. Tensor and pipeline parallelism cannot split it, and it cannot
    be exported. Default: one embedding of hidden_size for all tokens."""

    adaptive_factor: int = Field(default=4, gt=0)
    """adaptive_cutoffs: tail i has embeddings of hidden_size / adaptive_factor^i channels, i from 1
    (fairseq: --adaptive-input-factor and --adaptive-softmax-factor)."""

    adaptive_dropout: float = Field(default=0.0, ge=0, lt=1)
    """adaptive_cutoffs: dropout probability of the softmax's input and of its tails' projections
    (fairseq: --adaptive-softmax-dropout; 0.2 for WikiText-103)."""

    embedding_scale: AutoOrPositive = "auto"
    """Factor on the word embeddings, the same for every position method. auto: sqrt(hidden_size),
    as in "Attention Is All You Need", fairseq and the code of "Train Short, Test Long"; but 1 with
    model.embedding_layernorm. Set 1 for embeddings as in GPT-2."""

    embedding_layernorm: bool = False
    """Apply a LayerNorm to the word embeddings, as Bloom does. It steadies the first steps of very
    large models (Le Scao et al. 2022, "What Language Model to Train if You Have One Million GPU
    Hours?", who also saw that it costs some zero-shot accuracy)."""

    parallel_residual: bool = False
    """Compute attention and MLP of a layer from the same input and add both to it, as GPT-NeoX and
    Pythia do. false: the MLP's input has the output of attention in it, as in GPT-2."""

    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the embeddings and of the output of each attention and MLP block. 0
    suits training that sees every token once."""

    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the attention weights. Raise it, as hidden_dropout, when the same text
    is read several times and the validation loss rises."""

    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability behind the activation of the MLP, before its second linear layer
    (fairseq: --activation-dropout; 0.1 for WikiText-103)."""

    final_layernorm: bool = True
    """Apply a LayerNorm behind the last layer. false leaves it out, as fairseq's
    --no-decoder-final-norm and Baevski and Auli 2019 do; no Hugging Face class holds that."""

    layernorm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in every LayerNorm, so that nothing is divided by zero. Change it to
    continue a model that was trained with another value."""

    init_method_std: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """Standard deviation of the initial weights. Output projections of attention and MLP start with
    it divided by sqrt(2 x num_layers), as in GPT-2."""

    embedding_init_method_std: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Standard deviation of the initial word embeddings, of a learned position table and of an
    untied output layer. Default: 1 / sqrt(hidden_size), as in fairseq, so that word embeddings
    times embedding_scale = auto start with a variance of 1. GPT-2 has init_method_std."""

    make_vocab_size_divisible_by: int = Field(default=128, gt=0)
    """The embedding has data.vocab_size rows, rounded up to a multiple of this. It does not depend
    on the layout, so that a checkpoint fits every layout; tensor parallelism must divide the
    result."""

    attention_backend: Literal[
        "auto", "triton", "flash2", "flash4", "flex", "folded", "sdpa", "reference"
    ] = "auto"
    """The attention kernel. auto takes the fastest that can serve the model on this device and logs
    which, why, and in which dtype it multiplies; any other value is used or is an error, never
    replaced. Change it to compare kernels or to rule one out."""


class PositionSection(Section):
    """[position]: how the model knows the order of tokens."""

    method: Literal["alibi", "sinusoidal", "rotary", "t5", "learned", "none"] = "alibi"
    """alibi: linear biases on attention scores. sinusoidal, learned: a table added to the
    embeddings. rotary: queries and keys are rotated. t5: a learned bias on attention scores for
    each bucket of distances. none: no positions."""

    slopes: Slopes = "published"
    """alibi: the slopes of the heads. published: those of the paper, 2^(-8 (h + 1) / n) for n heads
    where n is a power of two, and those of the authors' code for other n. A list has one slope for
    each head of the model, from 0, which adds nothing to a head's scores, to 100. A table such as
    {first = 0.5, last = 0.00390625} is a geometric sequence from the first head to the last."""

    trainable_slopes: bool = False
    """alibi: train the slopes, from those of position.slopes on. The paper found it slower, and
    worse beyond the training length."""

    sinusoidal_table: Literal["fairseq", "vaswani"] = "fairseq"
    """sinusoidal: which table. fairseq: the one of the models that "Train Short, Test Long"
    compares with, and of tensor2tensor: positions counted from 2, frequencies from 1 to exactly
    1/10000. vaswani: positions counted from 0, and the frequencies that "Attention Is All You Need"
    states. In both, sines come first and then cosines."""

    rotary_base: int = Field(default=10_000, gt=0)
    """rotary: base of the frequencies. A larger one makes rotations slower, as models for long
    contexts have them."""

    rotary_percent: float = Field(default=1.0, gt=0, le=1)
    """rotary: share of each head's channels that is rotated, the first ones. GPT-NeoX and Pythia
    rotate 0.25 of them."""

    relative_attention_num_buckets: int = Field(default=32, gt=1)
    """t5: buckets of the learned bias. The first half hold one distance each, the others widen
    logarithmically."""

    relative_attention_max_distance: int = Field(default=128, gt=1)
    """t5: distance in tokens from which on all keys share the last bucket."""

    max_position_embeddings: int | None = Field(default=None, gt=0)
    """learned: rows of the position table, in tokens, beyond which the model cannot be evaluated.
    Default: data.sequence_length."""
