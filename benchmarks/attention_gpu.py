"""Attention on this machine's GPU, every way side by side: `pretrain bench attention`, needing nothing but torch (and triton).

Usage: python -m benchmarks.attention_gpu [--write FILE] [--lengths 1024,16384] [--seconds 480]. No network; on a CPU it runs the fallbacks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pretrain.kernels.bench import bench_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="Also write the table to this Markdown file.")
    parser.add_argument("--lengths", help="Tokens, comma-separated.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480.0,
        help="About how long it may take, compilation apart.",
    )
    arguments = parser.parse_args()
    lengths = [int(n) for n in arguments.lengths.split(",")] if arguments.lengths else None
    text = bench_attention(lengths, arguments.seconds)
    if arguments.write is not None:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
