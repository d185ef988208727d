"""Measure any Hugging Face model at lengths beyond the one that it was trained at.

    python examples/evaluate_a_model.py MODEL TEXT.txt [LENGTH ...]

MODEL is a folder, or a name on the Hub, which is downloaded. Windows, protocols and intervals are
those of `pretrain evaluate` for runs, so the numbers are comparable with those of a run.
"""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

import pretrain


def main(name: str, text: Path, lengths: list[int]) -> None:
    folder = name if Path(name).is_dir() else snapshot_download(name)
    for record in pretrain.evaluate(folder, text=[str(text)], lengths=lengths):
        low, high = record["loss_low"], record["loss_high"]
        print(
            f"{record['protocol']:15} {record['length']:6}  perplexity {record['perplexity']:10.3f}"
            f"  loss {record['loss_nats']:.4f} [{low:.4f}, {high:.4f}] nats"
        )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), [int(n) for n in sys.argv[3:]] or [128, 256, 512])
