"""Generate tokens one after the other, with a cache of keys and values.

Megatron's static inference context holds the cache, and its attention fills it; core attention then
sees a few queries behind many keys, which every position method can serve: score terms depend on
distances alone, rotated keys are cached rotated, and what is added to the embeddings is looked up
at the tokens' own positions. Shapes: B sequences, n tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain import platform
from pretrain.config import ConfigError, RunConfig


def check_generation(config: RunConfig, length: int) -> None:
    """Check that a model can generate up to `length` tokens, the prompt's included.

    Raises:
        ConfigError: A part of the layout does not work, or there are no positions beyond a length.
    """
    if config.is_masked:
        raise ConfigError(
            'train.objective = "masked": the model looks both ways, so it predicts no next token. '
            'Set "next_token"'
        )
    if config.model.adaptive_cutoffs is not None:
        raise ConfigError(
            f"model.adaptive_cutoffs = {list(config.model.adaptive_cutoffs)}: generation computes "
            "logits of all words, which an adaptive softmax avoids. Remove the key"
        )
    if config.parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "parallel.pipeline_model_parallel_size = "
            f"{config.parallel.pipeline_model_parallel_size}: generation runs without pipeline "
            "stages, which would wait for each other at every token. Set 1, and split the model by "
            "parallel.tensor_model_parallel_size"
        )
    if config.parallel.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel = true: a single new token cannot be split along the "
            "sequence. Set false for generation; the layout does not change what is computed"
        )
    last = config.max_position_embeddings
    if config.position.method == "learned" and length > last:
        raise ConfigError(
            f"{length:,} tokens, of the prompt and after it: the learned position table has {last} "
            "rows (position.max_position_embeddings). Choose fewer"
        )


def cache_bytes(config: RunConfig, batch_size: int, length: int) -> int:
    """Return the bytes of the cache on each tensor-parallel rank.

    A key and a value of head_dim numbers, for each layer, key head of the rank, and token.

    Args:
        config: The run.
        batch_size: Sequences at once.
        length: Tokens of each that the cache has room for.
    """
    groups = config.num_query_groups // config.parallel.tensor_model_parallel_size
    numbers = 2 * config.model.num_layers * groups * config.head_dim * batch_size * length
    return numbers * platform.DTYPES[config.train.precision].itemsize


class Decoder:
    """Passes sequences through a model piece by piece, each token once.

    Args:
        chunk: The whole model, or a tensor-parallel rank's part of all layers. Switched to
            evaluation, in which it stays.
        batch_size: Sequences at once.
        max_length: Tokens of each, the prompt's included, that the cache has room for.
    """

    def __init__(self, chunk: GPTModel, batch_size: int, max_length: int) -> None:
        self.chunk = chunk.eval()
        self.context = StaticInferenceContext(batch_size, max_length)

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor:
        """Continue the sequences, and return the logits after their last tokens.

        All tensor-parallel ranks together, with the same tokens.

        Args:
            tokens: What follows what was fed before, int64 [B, n].

        Returns:
            fp32 [B, V], the same on every rank.

        Raises:
            ValueError: The cache has no room for so many tokens, or was made for fewer sequences.
        """
        begin, count = self.context.sequence_len_offset, tokens.shape[1]
        rows, room = self.context.max_batch_size, self.context.max_sequence_length
        if len(tokens) > rows or begin + count > room:
            raise ValueError(
                f"{len(tokens)} x {count} tokens after {begin}: the cache is for {rows} sequences "
                f"of {room} tokens"
            )
        positions = torch.arange(begin, begin + count, device=tokens.device).expand_as(tokens)
        logits: Tensor = self.chunk(
            tokens,
            positions,
            None,
            inference_context=self.context,
            runtime_gather_output=True,
        )
        self.context.increment_sequence_len_offset(count)
        return logits[:, -1].float()

    def reset(self) -> None:
        """Begin new sequences, in the same memory."""
        self.context.reset()

    def allocated_bytes(self) -> int:
        """Return the bytes that the cache takes on this rank; 0 before the first tokens."""
        layers = self.context.key_value_memory_dict.values()
        return sum(x.numel() * x.element_size() for pair in layers for x in pair)


def greedy(decoder: Decoder, prompt: Tensor, count: int, vocab_size: int) -> Tensor:
    """Generate the most probable token `count` times, and return these tokens, [B, count].

    Args:
        decoder: Continues from what it was fed before.
        prompt: Token ids, int64 [B, n].
        count: Tokens to generate, at least 1.
        vocab_size: Token ids that exist; the model's vocabulary may be padded.
    """
    generated: list[Tensor] = []
    while len(generated) < count:
        logits = decoder.feed(generated[-1] if generated else prompt)
        generated.append(logits[:, :vocab_size].argmax(dim=1, keepdim=True))
    return torch.cat(generated, dim=1)
