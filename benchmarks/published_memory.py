"""Count the memory of the published 1.3B runs from the code that trained them, fairseq's.

This says why the plan, which is of other code, needs less. Origin of every line: the authors'
repository ofirpress/attention_with_linear_biases at 4b92f28, a fork of fairseq. Their command for
these runs is not published; what is deduced from the published numbers is said to be.

    python -m benchmarks.published_memory

prints the sum of docs/performance.md part by part, and that no other number of tokens fits.
"""

from __future__ import annotations

from pretrain.study.published import content

LENGTHS = (512, 1024, 2048)
GIB = 2**30
LAYERS, WIDTH, HEADS, INNER = 25, 2048, 16, 8192
VOCABULARY = 50_264
TOKENS = 4096
"""Tokens that pass at once on a GPU. Deduced, by `fitting`."""
PARAMETERS = (
    VOCABULARY * WIDTH
    + LAYERS * (4 * WIDTH * WIDTH + 4 * WIDTH + 2 * WIDTH * INNER + INNER + WIDTH + 4 * WIDTH)
    + 2 * WIDTH
)


def scores(length: int, tokens: int = TOKENS, item: int = 2) -> int:
    """Softmax of all scores, which the product with the values saves in the training precision.

    fairseq/modules/multihead_attention.py calls torch's multi_head_attention_forward, whose softmax
    saves the same tensor.
    """
    return LAYERS * HEADS * tokens * length * item


def counted(length: int) -> dict[str, int]:
    """Bytes of a GPU when the backward pass of the loss runs, at which most is alive."""
    # fairseq/modules/transformer_layer.py: input and output of both norms, q, k, v, attention's
    # output, and the ReLU's output, which is also the second product's input (the default of
    # fairseq/models/transformer_lm.py); two statistics of each norm.
    layer = 2 * TOKENS * (8 * WIDTH + INNER) + 2 * 2 * 4 * TOKENS
    return {
        # fairseq/optim/fp16_optimizer.py, MemoryEfficientFP16Optimizer: no masters; adam.py keeps
        # moments in fp32. Deduced: masters (8 bytes more) would not have fit into 24.6 GiB.
        "state": (2 + 2 + 4 + 4) * PARAMETERS,
        # fairseq/distributed/legacy_distributed_data_parallel.py
        "buffer": 2 * 2**28,
        "scores": scores(length),
        "activations": LAYERS * layer,
        # fairseq/criterions/cross_entropy.py: log_softmax in fp32 and its gradient; the logits'.
        "loss": TOKENS * VOCABULARY * (4 + 4 + 2),
    }


def memory(length: int) -> float:
    """Published memory of sinusoidal positions; ALiBi's is 0.1 larger at 2,048, its mask."""
    value = content()["cc100_roberta"]["equal_updates"][f"sinusoidal_{length}"]["memory_gb"]
    return float(value)


def fitting() -> set[tuple[int, int]]:
    """Return the (tokens, bytes of a score) whose scores grow with the length as what is published.

    What is kept of a score: 2 bytes without dropout on attention, 5 with it, 6 by fairseq's own
    softmax in fp32.
    """

    def fits(tokens: int, item: int) -> bool:
        return all(
            abs((scores(b, tokens, item) - scores(a, tokens, item)) / GIB - memory(b) + memory(a))
            < 0.1
            for a, b in ((512, 1024), (1024, 2048))
        )

    return {
        (n, item) for n in (1024, 2048, 4096, 8192, 16384) for item in (2, 5, 6) if fits(n, item)
    }


def main() -> None:
    columns = [counted(length) for length in LENGTHS]
    for name in columns[0]:
        print(f"{name:12}", *(f"{column[name] / GIB:6.2f}" for column in columns))
    print(f"{'together':12}", *(f"{sum(column.values()) / GIB:6.2f}" for column in columns))
    print(f"{'published':12}", *(f"{memory(length):6.1f}" for length in LENGTHS))
    print("tokens at once, bytes of a score:", *fitting())


if __name__ == "__main__":
    main()
