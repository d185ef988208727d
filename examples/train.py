"""Train ALiBi at 64 tokens, look at perplexity up to 512, and export to Hugging Face.

    python examples/train.py [FOLDER]

Takes about half a minute on a core. The text (Shakespeare) comes with `make setup`.
"""

import sys
from pathlib import Path

import pretrain

DEMO = Path(pretrain.__file__).parent / "configs/demo.toml"


def main(folder: Path) -> None:
    config = pretrain.load_config(
        DEMO,
        {
            "run.directory": folder / "alibi",
            "data.directory": folder / "data",
            "data.sequence_length": 64,
            "data.vocab_size": 1024,
            "model.num_layers": 2,
            "batch.global_batch_size": 16,
            "train.num_steps": 20,
            "schedule.lr_warmup_steps": 5,
            "evaluation.lengths": [64],
            "evaluation.max_tokens": 2048,
        },
    )
    pretrain.build_data(config)
    result = pretrain.train(config)
    print(f"step {result.step}, {result.checkpoint}")

    records = pretrain.evaluate(result.directory, lengths=[64, 128, 256, 512], max_tokens=2048)
    for record in records:
        print(f"{record['protocol']:15} {record['length']:4}  {record['perplexity']:8.2f}")

    pretrain.export_model(result.directory, folder / "hf")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example"))
