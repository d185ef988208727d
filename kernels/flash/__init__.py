"""A flash-attention kernel in Triton with score biases: ALiBi slopes, T5 buckets, or none.

The algorithm is that of Dao, "FlashAttention-2" (arXiv 2307.08691): one program owns a tile of
queries (in part of the backward, a tile of keys) and loops over the tiles on the other side with a
running softmax in base 2. This kernel differs in five points:

- The bias is computed inside the kernel, in fp32, from exact integer distances. It is either
  -slope * |distance| (ALiBi), or an entry of a row that holds one bias per distance for each head,
  whose two ends serve every distance beyond them (T5's buckets are constant there).
- With ALiBi, tiles of keys whose weights are too small to change the result are not loaded. A
  program first attends to the keys at its queries' own positions; the logsumexp over these keys
  decides which other tiles are needed (the bound and its proof are below). The forward pass stores
  the decision, and the backward pass visits the same tiles. The host never waits for the decision.
- Queries can be limited to the keys of their own document. Since documents are contiguous, one
  number per query says so: the smallest position that the query sees. No kernel loads tiles that
  lie wholly in other documents: kernels that loop over keys begin where the document of their first
  query begins, and the kernel that loops over queries stops at the first document that begins after
  its keys.
- There are no atomic additions. Gradients of slopes, of bias rows and of key heads that several
  query heads share are summed in a fixed order, so two runs agree bit for bit.
- Programs are ordered so that long ones start first (see `forward.py`).

Files:

- `launch.py`: what callers use: the autograd function, the block sizes for each dtype, head width
  and GPU generation, and the launches of both passes.
- `device.py`: device functions that several kernels share, including those that decide which tiles
  of keys are visited.
- `forward.py`: the forward kernel.
- `backward.py`: the gradients of keys and values, of queries, and of the bias rows.

**Which tiles are skipped.** A key far from its query carries the bias -slope * distance. Where no
product q.k can make up for that bias, the key's weight is too small to change any result, and its
tile need not be loaded. The kernel decides this for each pair of a tile of queries and a tile of
keys, from numbers that it computes anyway (`device.py`). `tests/kernels/oracles.py` has the same
arithmetic in plain torch, and the tests compare the two.

**The bound.** All scores are in base 2. For query i and key j, with N keys in all,

    s_ij = log2(e) * (scale * q_i . k_j - slope * |i - j|)        the score
    L_i  = log2(sum over j of 2^s_ij)                             the logsumexp of row i
    w_ij = 2^(s_ij - L_i)                                         the weight

Take a tile of queries and a tile of keys. Let |q| and |k| be the largest 2-norms in the tiles, and
d the smallest distance between them.

1. No score is above `most`. By Cauchy-Schwarz,

       s_ij <= most = log2(e) * (|scale| |q| |k| - slope * d).

2. No logsumexp is below `floor`. A sum only grows with more terms, so L_i is at least the logsumexp
   over the query's *own* tiles, those that hold the keys at the positions of the tile's queries.
   `floor` is the lowest of these logsumexps over the queries of the tile. The kernel attends to the
   own tiles first, so it has the logsumexps before it decides.
3. Hence w_ij <= 2^(most - floor). The tile is skipped if

       floor - most > need + log2(N).

   Then each of its weights is below 2^-need / N, and since a row has at most N keys, all weights
   that a row loses sum to less than 2^-need.

A simpler `floor` would be the lowest score that norms permit, -|scale| |q| |k_own|. It is much
weaker: for Gaussian inputs the products of norms are several times as large as the scores.

**What `need` must cover.** It is NEEDED_BITS = 24, plus:

- log2(|v| / |v_own|) where a tile's longest value is longer than v_own, the value at the position
  of the first query (without a causal mask, the longest of the own tiles).
  What the output loses is a sum of weights times values. With this term it stays below 2^-24 of the
  own values, even if one giant value is far away.
- log2(|k| / |k_own|), likewise. The gradient of q is a sum of score gradients times keys, so a
  giant key can change that gradient although its weight is negligible.
- log2(N) once more if the slopes require a gradient. That gradient multiplies each score gradient
  by its distance, which is below N.

**What is lost.** With d_out_i the gradient of output i, w_ij the weights and N the number of keys:

    |error of out_i| < 2^-24 * (|v_own| + |out_i|)
    |error of dq_i|  < 2^-24 * |scale| |d_out_i| * (|k_own| (|v_own| + |out_i|)
                       + sum over j of w_ij |k_j| (|v_own| + 2 |out_i| + |v_j|))
    |error of dk_j|  < 2^-24 * |scale| * sum over i of |q_i| |d_out_i|
                       * ((w_ij + 1 / N) (|v_own| + 2 |out_i|) + w_ij |v_j|)
    |error of dv_j|  < 2^-24 * sum over i of (w_ij + 1 / N) |d_out_i|

These bounds are relative to the terms of which a gradient is the sum, and not to the sum, in which
the terms may nearly cancel. The parts with |k_own| or 1 / N come from the weights that are dropped;
the parts with w_ij come from the other weights, which are renormalized, and the changed output.

**Rounding** always counts against skipping (the three SLACK constants), except that of scores in
the own tiles whose products cancel. On a CPU, where the floor was computed alike, no search found
more than the bounds above at a |scale| |q| |k| of up to 10^4, and one did at 10^6. Scores of that
size are themselves wrong by 0.1 in fp32. Heads whose slope is not positive skip nothing. Rows that
are not finite count as infinitely long, so every query that sees a NaN or an infinity visits its
tile.

**Lists.** The kernels go through a list of the tiles that matter, so one key far back that must be
visited (an attention sink, often key 0) costs one tile. The backward pass visits the same tiles as
the forward pass.

**Documents.** Where queries see no key before the start of their own document, the bound still
holds for the keys that a query sees: floors are computed from these keys alone, so they are lower,
and |q|, |k| and |v| are taken over whole tiles, so they are larger. A query that sees any key
before its own tiles sees every position from that key up to its own, including the position of the
tile's first query, so the own value and key in `need` belong to its document. A token of another
document can decide whether a tile that holds both documents is skipped, and can thereby change an
output by the 2^-24 above.

**Causality.** Under a causal mask and with finite q, k and v, a later token does not change a
single bit of an output, although the queries of a tile decide together. (Keys after a query get the
weight 0, and 0 times an infinity or a NaN among their values is NaN, as in every backend.) The own
value and key in `need` are those at the position of the tile's first query, which all its queries
see. Floor and |q| of the tile decide which tiles of keys are loaded; within a loaded tile, a query
that could skip the tile by its own logsumexp and its own norm gives its keys no weight. As the tile
decides with twice the slack, it skips only what each of its queries skips. The gradients of keys
and values, to which later queries contribute in any case, do include these weights, which are below
the bound.

This guarantee holds where the slack covers the rounding of the two comparisons in fp32. Terms of
the size of the floor are covered everywhere, by RELATIVE_SLACK. All other rounding adds up to at
most 7 * 2^-24 of the threshold over both comparisons, since the device associates their products
differently. ABSOLUTE_SLACK covers that error for thresholds down to -2^15 bits: a slope * distance
of 22,700, or 22,700 keys at a slope of 1. Further away, a tile of keys that one of the queries
would visit may be skipped, if the product of norms is also of that size. The lost weights are
within the bounds above even then, since the distance has a RELATIVE_SLACK of its own, but they may
depend on a later token of the tile.
"""
