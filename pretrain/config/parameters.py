"""Count parameters in closed form, of the whole model and of one rank, without building the model.

The launcher sizes its checkpoint times with these counts, and `pretrain config` prints them. The
tests compare them with a sum over all tensors, and with the models that Megatron builds.
"""

from __future__ import annotations

from pretrain.config.run import RunConfig


def num_parameters(config: RunConfig) -> int:
    """Return the number of distinct parameters of the whole model.

    The rows that pad the vocabulary count, and an embedding that is tied to the output layer counts
    once.
    """
    c, m = config, config.model
    embedding = c.padded_vocab_size * m.hidden_size
    total = m.num_layers * _layer(c, tensor=1) + _final_norm(c)
    total += _adaptive(c) or embedding * (1 if m.tie_word_embeddings else 2)
    return total + _embedding_norm(c) + _position_table(c) + _score_positions(c, tensor=1)


def num_parameters_of_rank(config: RunConfig, pipeline_rank: int) -> int:
    """Return the number of parameters that a rank of one pipeline stage holds.

    ZeRO is not considered: it may shard them further. All tensor-parallel and data-parallel ranks
    of a stage hold the same number. The sum over stages may exceed `num_parameters`: with pipeline
    stages a tied embedding stands on the first and on the last one, and T5's bias table and
    trainable slopes stand on every stage.

    Args:
        config: The run.
        pipeline_rank: The pipeline stage, from 0.
    """
    c, m, p = config, config.model, config.parallel
    tensor, pipeline = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    layers = sum(c.layers_per_chunk[pipeline_rank::pipeline])
    first, last = pipeline_rank == 0, pipeline_rank == pipeline - 1
    embedding = c.padded_vocab_size // tensor * m.hidden_size
    # The last stage needs an output matrix. With one stage and tied weights that is the embedding.
    copies = int(first) + int(last and not (first and m.tie_word_embeddings))
    words = _adaptive(c) or copies * embedding
    total = layers * _layer(c, tensor) + words + _score_positions(c, tensor)
    return total + first * (_embedding_norm(c) + _position_table(c)) + last * _final_norm(c)


def _layer(c: RunConfig, tensor: int) -> int:
    """Return the parameters of one transformer layer on one of `tensor` tensor-parallel ranks."""
    h, bias = c.model.hidden_size, c.model.use_bias
    # Column-parallel: linear_qkv and linear_fc1 split their outputs, weights and biases alike.
    qkv = (c.model.num_attention_heads + 2 * c.num_query_groups) * c.head_dim // tensor
    ffn = c.ffn_hidden_size // tensor
    column = (qkv + ffn) * (h + bias)
    # Row-parallel: linear_proj and linear_fc2 split their inputs. Every rank holds their biases.
    row = (h // tensor + ffn) * h + 2 * h * bias
    return column + row + 2 * _norm(c)


def _adaptive(c: RunConfig) -> int:
    """Return the parameters of adaptive inputs and of the adaptive softmax; 0 without them."""
    clusters, hidden = c.adaptive_clusters, c.model.hidden_size
    words = sum(cluster.size * cluster.dim for cluster in clusters)
    projections = [hidden * cluster.dim for cluster in clusters]
    # The head of the softmax has a row for each tail, and multiplies its words as they are.
    softmax = len(clusters[1:]) * hidden
    own = 0 if c.model.tie_word_embeddings else words + sum(projections[1:])
    return words + sum(projections) + softmax + own


def _norm(c: RunConfig) -> int:
    """Return the parameters of one LayerNorm, which no layout splits."""
    return (1 + c.model.use_bias) * c.model.hidden_size


def _final_norm(c: RunConfig) -> int:
    """Return the parameters of the LayerNorm behind the last layer, which the last stage holds."""
    return _norm(c) if c.model.final_layernorm else 0


def _embedding_norm(c: RunConfig) -> int:
    """Return the parameters of the LayerNorm on the embeddings, which the first stage holds."""
    return _norm(c) if c.model.embedding_layernorm else 0


def _position_table(c: RunConfig) -> int:
    """Return the parameters of the learned position table, which the first stage holds whole."""
    return c.max_position_embeddings * c.model.hidden_size if c.position.method == "learned" else 0


def _score_positions(c: RunConfig, tensor: int) -> int:
    """Return the parameters of T5's bias table or of trainable slopes, split over heads."""
    heads = c.model.num_attention_heads // tensor
    if c.position.method == "t5":
        return heads * c.position.relative_attention_num_buckets
    return heads if c.position.method == "alibi" and c.position.trainable_slopes else 0
