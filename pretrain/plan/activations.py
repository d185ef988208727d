"""Bytes of the tensors that a rank keeps for the backward pass, and of those that come and go.

These are closed forms of what Megatron's layers, our attention and our loss save
(tests/unit/test_plan_memory.py compares them with every allocation of real ranks). Letters: T
tokens of a micro batch, d hidden size, t tensor-parallel size. Norms, residual stream and dropout
hold T / t tokens under sequence parallelism; what stands between the two products of a block is
divided by t in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pretrain.config import RunConfig

ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in each precision."""
LOSS_PIECE = 2**24
"""Logits that the loss turns into fp32 at once where it is not compiled (`pretrain.model.loss`)."""
FOLDED_COLUMNS = 6
"""Columns that ALiBi adds to q and k on a V100 (`pretrain.kernels.folded`)."""
FOLDED_KEYS = 60_000
"""Keys that such columns serve at most."""
BIASED = ("alibi", "t5")
"""Position methods that add a bias to the scores."""
WIDEST_HEAD = 256
"""Width of a head that the Triton kernel serves at most."""
QUERY_BLOCK = 256
"""Queries of a masked call of torch's attention (`pretrain.kernels.sdpa`)."""


def attention_backend(config: RunConfig, is_modern: bool) -> str:
    """Return the backend that model.attention_backend = auto takes on a GPU that has Triton.

    That is `pretrain.kernels.choice`, without torch. A test compares the two.

    Args:
        config: The run.
        is_modern: As in `Activations`.
    """
    method, parts_documents = config.position.method, config.data.per_document_attention
    if method not in BIASED and not parts_documents:
        return "sdpa"
    if is_modern and config.head_dim <= WIDEST_HEAD:
        return "triton"
    is_fixed = method == "alibi" and not config.position.trainable_slopes
    if (
        is_fixed
        and not parts_documents
        and config.train.precision != "fp32"
        and config.data.sequence_length <= FOLDED_KEYS
    ):
        return "folded"
    return "sdpa"


@dataclass(frozen=True)
class Activations:
    """The tensors of one micro batch in the chunks of a rank. All are in bytes."""

    config: RunConfig
    is_modern: bool
    """The GPU has bf16, a Triton kernel for attention, and fused operations by torch.compile."""

    @cached_property
    def item(self) -> int:
        """Bytes of a number in the training precision."""
        return ITEM[self.config.train.precision]

    @cached_property
    def tokens(self) -> int:
        """T, tokens of a micro batch."""
        return self.config.batch.micro_batch_size * self.config.data.sequence_length

    @cached_property
    def tensor(self) -> int:
        """t, the tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @cached_property
    def stream_tokens(self) -> int:
        """Tokens of which this rank holds norms and residual stream."""
        return self.tokens // (self.tensor if self.config.parallel.sequence_parallel else 1)

    @cached_property
    def stream(self) -> int:
        """One tensor of the residual stream."""
        return self.stream_tokens * self.config.model.hidden_size * self.item

    @cached_property
    def whole(self) -> int:
        """One tensor of the width d for all tokens, whatever the sequence parallelism."""
        return self.tokens * self.config.model.hidden_size * self.item

    @cached_property
    def inner(self) -> int:
        """The output of the first product of the MLP."""
        return self.tokens * self.config.ffn_hidden_size // self.tensor * self.item

    @property
    def has_fused_loss(self) -> bool:
        """True if the loss keeps no second copy of the logits: `train.fusion` on a GPU."""
        return self.config.train.fusion != "off"

    @property
    def accumulates_in_products(self) -> bool:
        """True if weight gradients are added to fp32 by the product itself."""
        return self.has_fused_loss and self.is_modern and self.config.parallel.zero_stage == 1

    def layer(self) -> int:
        """Return what a layer keeps, by train.recompute_granularity."""
        recompute = self.config.train.recompute_granularity
        if recompute == "full":
            return self.stream
        return self.whole_layer(keeps_core=recompute == "none")

    def whole_layer(self, keeps_core: bool = True) -> int:
        """Return what a layer keeps without recomputation, or with that of attention's core."""
        m = self.config.model
        # Inputs and outputs of both norms, and their statistics, of which torch keeps two a token.
        norms = 4 * self.stream + 2 * 2 * 4 * self.stream_tokens
        if m.parallel_residual:
            # Both norms have the same input.
            norms -= self.stream
        dropout = 2 * self.stream // self.item if m.hidden_dropout else 0
        # ReLU's backward pass reads its output, which the second product keeps anyway.
        mlp = self.inner if m.hidden_act == "relu" else 2 * self.inner
        if m.activation_dropout:
            # The mask, of a byte an element; and ReLU's output is no longer the product's input.
            mlp += self.inner // self.item + (self.inner if m.hidden_act == "relu" else 0)
        return norms + dropout + mlp + self._attention(keeps_core)

    def _attention(self, keeps_core: bool) -> int:
        """Return what attention keeps beside its input: queries, keys, values and output."""
        c = self.config
        heads = c.model.num_attention_heads // self.tensor
        # The kernels of a V100 have no grouped queries: keys and values are repeated for each head.
        groups = c.num_query_groups // self.tensor if self.is_modern else heads
        query = heads * c.head_dim * self.item
        pair = 2 * groups * c.head_dim * self.item
        rows = 4 * heads
        kept = query + pair
        if c.position.method == "rotary":
            # The rotated queries and keys are new tensors, and the values a view of the old ones.
            kept += query + pair // 2
            # Sines and cosines, of queries and of keys, which the batch shares.
            kept += 4 * c.rotary_channels * self.item // c.batch.micro_batch_size
        elif 1 < groups < heads:
            # Queries of several groups are not evenly spaced, and are copied. Rotated ones are new
            # in any case.
            kept += query
        core = rows
        if self.uses_columns:
            extra = -(-(c.head_dim + FOLDED_COLUMNS) // 8) * 8 - c.head_dim
            core += (heads + groups) * extra * self.item
        elif self.uses_mask:
            # q, k, v and the output in fp32, and what was there before as far as it stays.
            core += (2 * query + pair) * 4 // self.item
        if not self.is_modern and not self.uses_mask:
            # The kernel's output has the batch first, and the projection copies it.
            core += query
        total = kept + query + (core if keeps_core else 0)
        return self.tokens * total + (self._mask() if keeps_core and self.uses_mask else 0)

    @property
    def uses_columns(self) -> bool:
        """True if ALiBi stands in columns of q and k: in fp16 on a V100."""
        return attention_backend(self.config, self.is_modern) == "folded"

    @property
    def uses_mask(self) -> bool:
        """True if a bias reaches attention as a mask in memory."""
        is_biased = self.config.position.method in BIASED
        return is_biased and attention_backend(self.config, self.is_modern) == "sdpa"

    def _mask(self) -> int:
        """Return the fp32 masks of a layer, which the batch shares: a block of queries each."""
        length = self.config.data.sequence_length
        heads = self.config.model.num_attention_heads // self.tensor
        blocks = range(length, 0, -QUERY_BLOCK)
        return 4 * heads * sum(min(QUERY_BLOCK, keys) * keys for keys in blocks)

    def embedding(self) -> int:
        """Return what the embedding keeps beside the input of the first layer: token ids."""
        ids = 8 + (9 if self.tensor > 1 else 0)
        dropout = self.stream // self.item if self.config.model.hidden_dropout else 0
        norm = 0
        if self.config.model.embedding_layernorm:
            norm = self.stream + 8 * self.stream_tokens
        return ids * self.tokens + dropout + norm

    def logits(self) -> int:
        """Return the logits of a micro batch, in every form in which the loss keeps them."""
        # Megatron's loss keeps their softmax, in fp32.
        per_logit = self.item if self.has_fused_loss else 4
        return self.tokens * self.config.padded_vocab_size // self.tensor * per_logit

    def loss(self) -> int:
        """Return what the final norm and the loss keep beside the logits."""
        # Input and output of the norm, of which the output layer has gathered all tokens; labels,
        # and three statistics a token.
        norm = self.stream + 8 * self.stream_tokens + self.whole
        if not self.config.model.final_layernorm:
            # What the last layer puts out is the output layer's input.
            norm = self.whole
        return norm + (8 + 3 * 4) * self.tokens

    def loss_buffers(self, is_tied_here: bool) -> int:
        """Return what the backward pass of the loss needs beside what is kept.

        Args:
            is_tied_here: The embedding and the output layer are one parameter of this rank.
        """
        gradient = self.whole + (self.stream if self.config.parallel.sequence_parallel else 0)
        if not is_tied_here or not self.accumulates_in_products:
            # A gradient of the weight's shape for autograd, filled or not.
            gradient += self.embedding_weight()
        logits = self.tokens * self.config.padded_vocab_size // self.tensor
        if not self.has_fused_loss:
            # The softmax has become the logits' gradient, and is gone when the products begin.
            gradient = self.item * logits + max(0, gradient - self.logits())
        elif not self.is_modern:
            gradient += 4 * min(logits, LOSS_PIECE)
        return gradient + 8 * self.tokens

    def embedding_weight(self) -> int:
        """Return the embedding of this rank in the training precision."""
        rows = self.config.padded_vocab_size // self.tensor
        return rows * self.config.model.hidden_size * self.item

    def layer_buffers(self) -> int:
        """Return what the backward pass of a layer needs beside what is kept, at most."""
        total = max(self._mlp_buffers(), self._attention_buffers())
        if self.config.train.recompute_granularity == "full":
            # The layer runs once more and keeps everything; its input is kept already. The output
            # of its last product is there as well when the backward pass begins.
            total += self.whole_layer()
        return total

    def _mlp_buffers(self) -> int:
        """Return the buffers of the second product of the MLP, or of ReLU's backward pass.

        They are the gradients of the product's output and of its input, and one of its weight's
        shape. ReLU writes a second gradient of its own size, while its output is still there.
        """
        c = self.config
        weight = c.model.hidden_size * c.ffn_hidden_size // self.tensor * self.item
        gathered = self.whole if c.parallel.sequence_parallel else 0
        dropped = self.stream if c.model.hidden_dropout else 0
        beside = weight + gathered
        if c.model.hidden_act == "relu":
            beside = max(beside, self.inner)
        return self.stream + self.inner + beside + dropped

    def _attention_buffers(self) -> int:
        """Return the buffers of attention, when what the MLP keeps has been given back.

        They are the gradients of the residual stream, of the output, and of queries, keys and
        values; and with a learned bias the kernel's sums of its gradient (kernels/flash/launch.py).
        """
        c = self.config
        heads = c.model.num_attention_heads // self.tensor
        pairs = (heads + 2 * c.num_query_groups // self.tensor) * c.head_dim * self.item
        sums = 0
        if self.is_modern and c.position.method == "t5":
            reach = min(c.data.sequence_length, c.position.relative_attention_max_distance)
            block = 32 if c.head_dim * self.item < 1024 else 16
            sums = 4 * heads * -(-(reach + block - 1) // block) * 16 * block * 2 * block
        given_back = 2 * self.inner + 2 * self.stream
        return 2 * self.stream + self.whole // self.tensor + self.tokens * pairs + sums - given_back

    def persistent(self) -> int:
        """Return the buffer in which Megatron gathers sequences, which is never freed."""
        return self.whole if self.config.parallel.sequence_parallel else 0
