"""Attention for position methods that are a function of the scores, in torch's own operations.

It is exact and computes in fp32, one block of queries at a time: B x H x QUERY_BLOCK x keys scores
are in memory at once, in the forward pass and in the backward pass, which recomputes each block. It
supports every device, causal and symmetric attention, dropout, documents, and learned parameters of
the function. A kernel compiled for one method would be faster; this one is the same for all.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head,
# Q queries of a block, K keys that they are given.

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.kernels.call import Call, ScoreBias
from pretrain.kernels.sdpa import within_documents

QUERY_BLOCK = 256
"""Queries of a block, which gets no keys after its last query or beyond a window."""


def refusal(call: Call) -> str | None:
    """Return the reason why this cannot serve a call, or None if it can."""
    return None if call.bias == "scores" else "it serves methods that are a function of the scores"


def attention_scored(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Compute softmax(f(scale * q k^T)) v for a method's function f of scores.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: The function, and whether attention is causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.
        document_starts: As in `pretrain.kernels.dispatch.attention`, or None.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.
    """
    assert bias.scores is not None
    scale = q_SBHD.shape[3] ** -0.5 if scale is None else scale
    window, num_keys = bias.scores.window, len(k_SBGD)
    before = num_keys - len(q_SBHD)
    outs = []
    for start in range(0, len(q_SBHD), QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, len(q_SBHD)))
        first, end = 0, before + rows.stop if bias.causal else num_keys
        if window is not None:
            first = max(before + rows.start - window + 1, 0)
            end = max(min(before + rows.stop - 1 + window, end), 0)
        out: Tensor = checkpoint(
            _block,
            q_SBHD[rows],
            k_SBGD[first:end],
            v_SBGD[first:end],
            None if document_starts is None else document_starts[:, rows],
            (bias, scale, dropout_p, before + rows.start, first),
            use_reentrant=False,
            # Needed, because the tracked generator is forked only around the forward call.
            preserve_rng_state=dropout_p > 0,
        )
        outs.append(out)
    return torch.cat(outs)


def _block(
    q_QBHD: Tensor,
    k_KBGD: Tensor,
    v_KBGD: Tensor,
    document_starts: Tensor | None,
    how: tuple[ScoreBias, float, float, int, int],
) -> Tensor:
    """Return the output of some queries, [Q, B, H, D]; `how` ends with the first positions."""
    bias, scale, dropout_p, first_query, first_key = how
    assert bias.scores is not None
    # Products of half-precision numbers are exact in fp32, and so are sums of scores and biases.
    wide = torch.promote_types(q_QBHD.dtype, torch.float32)
    q, k, v = (x.permute(1, 2, 0, 3).to(wide) for x in (q_QBHD, k_KBGD, v_KBGD))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    query = torch.arange(q.shape[2], device=q.device) + first_query
    key = torch.arange(k.shape[2], device=q.device) + first_key
    scores = bias.scores(q @ k.mT * scale, q, k, query, key)
    distance = query[:, None] - key
    if bias.causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if bias.scores.window is not None:
        scores = scores.masked_fill(distance.abs() >= bias.scores.window, -torch.inf)
    scores = within_documents(scores, document_starts, first_key)
    weights = torch.nn.functional.dropout(scores.softmax(dim=-1), dropout_p)
    return (weights @ v).permute(2, 0, 1, 3).to(q_QBHD.dtype)
