"""Measure anyone's Hugging Face model beyond the length that it was trained at.

    python examples/evaluate_a_model.py MODEL TEXT.txt [LENGTH ...]

MODEL is a folder, or a name on the Hub. Windows, protocols and intervals are those by which
`pretrain evaluate` measures our own runs, so the numbers compare.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import pretrain


def main(name: str, text: Path, lengths: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    token_ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
    for record in pretrain.evaluate(model, token_ids=token_ids, lengths=lengths):
        low, high = record["loss_low"], record["loss_high"]
        print(
            f"{record['protocol']:15} {record['length']:6}  perplexity {record['perplexity']:10.3f}"
            f"  loss {record['loss_nats']:.4f} [{low:.4f}, {high:.4f}] nats"
        )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), [int(n) for n in sys.argv[3:]] or [128, 256, 512])
