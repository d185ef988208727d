"""Parameter counts in closed form, of the whole model and of one rank, without building anything."""

from __future__ import annotations

from pretrain.config.schema import RunConfig


def num_parameters(config: RunConfig) -> int:
    """Distinct parameters of the whole model, padded vocabulary included, a tied output layer counted once."""
    c, m = config, config.model
    embedding = c.padded_vocab_size * m.hidden_size
    total = (
        m.num_layers * _layer(c, tensor=1)
        + _norm(c)
        + embedding * (1 if m.tie_word_embeddings else 2)
    )
    return total + _first_stage_positions(c) + _score_positions(c, tensor=1)


def num_parameters_of_rank(config: RunConfig, pipeline_rank: int) -> int:
    """Parameters that a rank of pipeline stage `pipeline_rank` holds (every tensor rank holds as many).

    A tied embedding stands on the first and on the last stage, and a learned bias table on every stage.
    """
    c, m, p = config, config.model, config.parallel
    tensor, pipeline = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    layers = sum(c.layers_per_chunk[pipeline_rank::pipeline])
    first, last = pipeline_rank == 0, pipeline_rank == pipeline - 1
    embedding = c.padded_vocab_size // tensor * m.hidden_size
    copies = int(first) + int(last and not (first and m.tie_word_embeddings))
    total = layers * _layer(c, tensor) + copies * embedding + _score_positions(c, tensor)
    return total + first * _first_stage_positions(c) + last * _norm(c)


def _layer(c: RunConfig, tensor: int) -> int:
    h, bias = c.model.hidden_size, c.model.use_bias
    qkv = (c.model.num_attention_heads + 2 * c.num_query_groups) * c.head_dim // tensor
    ffn = c.ffn_hidden_size // tensor
    column = (qkv + ffn) * (h + bias)
    row = (h // tensor + ffn) * h + 2 * h * bias
    return column + row + 2 * _norm(c)


def _norm(c: RunConfig) -> int:
    return (1 + c.model.use_bias) * c.model.hidden_size


def _first_stage_positions(c: RunConfig) -> int:
    return c.max_position_embeddings * c.model.hidden_size if c.position.method == "learned" else 0


def _score_positions(c: RunConfig, tensor: int) -> int:
    heads = c.model.num_attention_heads // tensor
    if c.position.method == "t5":
        return heads * c.position.relative_attention_num_buckets
    return heads if c.position.method == "alibi" and c.position.trainable_slopes else 0
