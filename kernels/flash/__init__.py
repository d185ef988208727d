"""A flash-attention kernel in Triton with score biases: ALiBi slopes, T5 buckets, or none.

The algorithm is that of Dao, "FlashAttention-2" (arXiv 2307.08691): one program owns a tile of
queries (in part of the backward, a tile of keys) and loops over the tiles on the other side with a
running softmax in base 2. This kernel differs in five points:

- The bias is computed inside the kernel, in fp32, from exact integer distances. It is either
  -slope * |distance| (ALiBi), or an entry of a row that holds one bias per distance for each head,
  whose two ends serve every distance beyond them (T5's buckets are constant there).
- With ALiBi, tiles of keys whose weights cannot show in the result are not loaded. A program first
  attends to the keys at its queries' own positions; the logsumexp of those decides which other
  tiles are needed (`pretrain.kernels.skipping` has the bound and its proof). The forward pass
  stores the decision and the backward pass visits the same tiles. The host never waits for it.
- Queries may see no key before the start of their own document. Since documents are contiguous,
  that is one number for each query, the smallest position that it sees. Tiles that lie wholly in
  other documents are not loaded, by no kernel: those that go through keys begin where the document
  of their first query does, and the one that goes through queries stops at the first document that
  begins after its keys.
- There are no atomic additions. Gradients of slopes, of bias rows and of key heads that several
  query heads share are summed in a fixed order, so two runs agree bit for bit.
- Programs are ordered so that long ones start first (see `forward.py`).

Files:

- `launch.py`: what callers use. Refusals, the autograd function, block sizes for each dtype, head
  width and GPU generation, and the launches of both passes.
- `device.py`: device functions that several kernels share, those that decide which tiles of keys
  are visited among them.
- `forward.py`: the forward kernel.
- `backward.py`: the gradients of keys and values, of queries, and of the bias rows.
"""
