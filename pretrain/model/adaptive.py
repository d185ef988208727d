"""Adaptive inputs and adaptive softmax: the rarer a word, the narrower its embedding.

Token ids are ordered by frequency and cut into clusters: the head, with the most frequent words,
and tails. Cluster i has embeddings of d / factor^i channels (d: hidden size), which a matrix
without a bias projects to d. The softmax has two levels. The head gives probabilities to its own
words and to each tail. A tail gives probabilities to its words, from hidden states that are
projected to its width:

    p(word of the head)   = head(word)
    p(word of tail i)     = head(tail i) tail_i(word)

The logits of a tail are computed only for tokens whose label is in that tail, so a vocabulary of
267,744 words costs about as much as one of 20,000 (Grave et al. 2017, "Efficient softmax
approximation for GPUs"; Baevski and Auli 2019, "Adaptive Input Representations for Neural Language
Modeling"). The results are those of fairseq's modules/adaptive_input.py and adaptive_softmax.py.

With model.tie_word_embeddings the softmax shares the embeddings of all clusters and the projections
of the tails with the input, as with fairseq's tie_adaptive_weights and tie_adaptive_proj. Only the
input has a projection for the head, [d, d].

Shapes: S tokens, B micro batch size, T = S x B, V vocabulary, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain.config import RunConfig
from pretrain.config.run import Cluster
from pretrain.model.loss import Options, linear_cross_entropy

NAMES = ("embedding.word_embeddings.", "output_layer.")
"""Prefixes of the global names of both modules' weights."""


class AdaptiveInput(nn.Module):
    """Word embeddings of several widths.

    Parameters: `embedding_i` [words, width] and `projection_i` [d, width] of each cluster i. They
    are parameters of this module itself, because ZeRO 3 gathers weights in hooks of modules.
    """

    def __init__(self, clusters: Sequence[Cluster], hidden_size: int) -> None:
        """Allocate the weights, which `initialize` of `pretrain.model.gpt` fills.

        Args:
            clusters: The head, then the tails.
            hidden_size: d.
        """
        super().__init__()
        self.clusters = tuple(clusters)
        for i, cluster in enumerate(clusters):
            _add(self, f"embedding_{i}", cluster.size, cluster.dim)
            _add(self, f"projection_{i}", hidden_size, cluster.dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings [B, S, d] of token ids [B, S]."""
        members, places = _by_cluster(ids.reshape(-1), self.clusters)
        parts = []
        for i, (cluster, own) in enumerate(zip(self.clusters, members)):
            # Even for a cluster without tokens, so that all ranks have gradients of the same
            # weights.
            words = F.embedding(own - cluster.first, getattr(self, f"embedding_{i}"))
            parts.append(F.linear(words, getattr(self, f"projection_{i}")))
        together = torch.cat(parts)
        out = torch.empty_like(together).index_copy(0, torch.cat(places), together)
        return out.view(*ids.shape, -1)


class AdaptiveSoftmax(nn.Module):
    """An output layer that returns losses, or the log probabilities of all words.

    It takes the place of the output layer in Megatron's GPTModel, and is called in the same way.
    Parameters: `tails` [number of tails, d], the head's rows for the tails; `embedding_i` of each
    cluster; and `projection_i` of each tail. The last two may be shared with the input.
    """

    embedding_0: nn.Parameter
    tails: nn.Parameter

    def __init__(
        self,
        clusters: Sequence[Cluster],
        hidden_size: int,
        tied: AdaptiveInput | None,
        dropout: float = 0.0,
        compiled: bool = False,
    ) -> None:
        """Allocate the weights, which `initialize` of `pretrain.model.gpt` fills.

        Args:
            clusters: The head, then the tails.
            hidden_size: d.
            tied: The input whose embeddings and projections are shared; None to share nothing.
            dropout: Dropout probability of the hidden states, and of their projections for the
                tails (fairseq: --adaptive-softmax-dropout).
            compiled: Compile the passes over the head's logits (`pretrain.model.gpt`).
        """
        super().__init__()
        self.clusters, self.dropout, self.compiled = tuple(clusters), dropout, compiled
        for i, cluster in enumerate(clusters):
            self._word_weight(f"embedding_{i}", tied, cluster.size, cluster.dim)
            if i:
                self._word_weight(f"projection_{i}", tied, hidden_size, cluster.dim)
        _add(self, "tails", len(clusters) - 1, hidden_size)

    def _word_weight(self, name: str, tied: AdaptiveInput | None, *shape: int) -> None:
        """Register the input's weight of this name, or a new one."""
        if tied is None:
            _add(self, name, *shape)
        else:
            self.register_parameter(name, getattr(tied, name))

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return (losses, None), or without labels (log probabilities, None).

        Args:
            input_: Hidden states, [S, B, d].
            weight: Not used; Megatron passes a tied weight here.
            runtime_gather_output: Not used.
            labels: Token ids [B, S], or None.

        Returns:
            The losses -log p(label), fp32 [B, S]; or log p of every word, fp32 [S, B, V], which
            serve as logits.
        """
        hidden = self._dropped(input_)
        if labels is None:
            return self.log_probabilities(hidden), None
        S, B, d = hidden.shape
        losses = self._losses(hidden.reshape(S * B, d), labels.t().reshape(-1))
        return losses.view(S, B).t().contiguous(), None

    def _losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return -log p of labels [T] after hidden states [T, d], fp32 [T]."""
        head = self.clusters[0].size
        choice = labels.clamp(max=head - 1)
        for i, tail in enumerate(self.clusters[1:]):
            choice = torch.where(labels >= tail.first, head + i, choice)
        losses = linear_cross_entropy(
            rows, self._head_weight(), choice, Options(compiled=self.compiled)
        )
        members, places = _by_cluster(labels, self.clusters)
        parts = []
        for i, tail in enumerate(self.clusters[1:], start=1):
            # Even without tokens, as in AdaptiveInput. Not compiled, because the number of tokens
            # changes with every batch.
            part = self._of_tail(i, rows.index_select(0, places[i]))
            weight = getattr(self, f"embedding_{i}")
            parts.append(linear_cross_entropy(part, weight, members[i] - tail.first, Options()))
        return losses.index_add(0, torch.cat(places[1:]), torch.cat(parts))

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Return log p of every word, fp32 [..., V], after hidden states [..., d]."""
        head = F.linear(hidden, self._head_weight()).float().log_softmax(-1)
        size = self.clusters[0].size
        parts = [head[..., :size]]
        for i in range(1, len(self.clusters)):
            logits = F.linear(self._of_tail(i, hidden), getattr(self, f"embedding_{i}"))
            parts.append(head[..., size + i - 1, None] + logits.float().log_softmax(-1))
        return torch.cat(parts, dim=-1)

    def _head_weight(self) -> Tensor:
        """Return the rows for the head's words and for the tails, [words + tails, d]."""
        return torch.cat([self.embedding_0, self.tails])

    def _of_tail(self, i: int, hidden: Tensor) -> Tensor:
        """Return hidden states [..., d] projected to the width of tail i."""
        return self._dropped(F.linear(hidden, getattr(self, f"projection_{i}").t()))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def install(config: RunConfig, model: GPTModel, compiled: bool) -> None:
    """Replace a model's embedding and output layer with adaptive inputs and an adaptive softmax.

    Args:
        config: The run's config, with model.adaptive_cutoffs.
        model: The whole model, on one rank.
        compiled: As in `AdaptiveSoftmax`.
    """
    m, clusters = config.model, config.adaptive_clusters
    words = AdaptiveInput(clusters, m.hidden_size)
    model.embedding.word_embeddings = words
    tied = words if m.tie_word_embeddings else None
    model.output_layer = AdaptiveSoftmax(
        clusters, m.hidden_size, tied, m.adaptive_dropout, compiled
    )
    model.vocab_size = model.embedding.vocab_size = config.padded_vocab_size


def initial_value(
    config: RunConfig, name: str, shape: Sequence[int], generator: torch.Generator
) -> Tensor:
    """Return the initial value of a weight of `AdaptiveInput` or `AdaptiveSoftmax`, fp32.

    As in fairseq: embeddings of the input from normal(0, 1 / sqrt(width)), unless
    model.embedding_init_method_std is set; projections, and the softmax's own weights, from the
    uniform distribution of Glorot and Bengio 2010.

    Args:
        config: The run's config.
        name: The global name.
        shape: The global shape.
        generator: What to draw from.
    """
    value = torch.empty(tuple(shape))
    rows, columns = shape
    is_input = name.startswith("embedding.")
    if is_input and ".embedding_" in name:
        std = config.model.embedding_init_method_std
        return value.normal_(0.0, columns**-0.5 if std is None else std, generator=generator)
    if not is_input and not config.model.tie_word_embeddings:
        clusters = config.adaptive_clusters
        if name.endswith((".embedding_0", ".tails")):
            # fairseq draws the head's words and the tails as one matrix.
            rows = clusters[0].size + len(clusters) - 1
    bound = math.sqrt(6 / (rows + columns))
    return value.uniform_(-bound, bound, generator=generator)


def _by_cluster(
    ids: Tensor, clusters: Sequence[Cluster]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the ids of each cluster, and their indices in `ids`. Synchronizes with the device.

    Args:
        ids: Token ids, int64 [T].
        clusters: The clusters, in order.
    """
    ordered, places = ids.sort(stable=True)
    ends = torch.stack([(ids < cluster.end).sum() for cluster in clusters]).tolist()
    sizes = [end - start for start, end in pairwise([0, *ends])]
    return torch.split(ordered, sizes), torch.split(places, sizes)


def _add(module: nn.Module, name: str, *shape: int) -> None:
    module.register_parameter(name, nn.Parameter(torch.empty(shape)))
