"""Run the product as a user does: train, save beside training, be killed, resume, evaluate, export.

    python -m benchmarks.gpu_day.product --out RESULTS --part product-1.3B

Everything goes through the product's commands, in processes of their own. SIGKILL comes while a
checkpoint is being written. The text is this repository's own, so that nothing has to be carried.
A step that is done is not repeated as long as its files (--work) are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from benchmarks.gpu_day.results import Row, Rows
from benchmarks.gpu_day.sizes import CONFIG, CUDA, SEQUENCES, TINY, precision
from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.files import PARTIAL, read_json_lines

ROOT = Path(__file__).parents[2]
TEXT = ("docs/*.md", "pretrain/**/*.py")
VOCABULARY = 4096
"""Pieces of the tokenizer. The 1.3B model's embedding keeps its size all the same."""
LENGTH = 1024 if CUDA else 128
RUNS = {
    # 3 saves each: the first is resumed from, SIGKILL comes within the second.
    "product-demo": (
        ROOT / "configs/demo.toml",
        (f"train.num_steps={240 if CUDA else 12}", "evaluation.lengths=[128,512]"),
    ),
    "product-1.3B": (
        CONFIG,
        (
            *(each for each in TINY if not CUDA and "vocab_size" not in each),
            f"train.num_steps={30 if CUDA else 6}",
            "parallel.world_size=1",
            "data.corpora=",
            f"batch.micro_batch_size={SEQUENCES}",
            f"batch.global_batch_size={2 * SEQUENCES}",
            f"train.precision={precision()}",
            *(("model.make_vocab_size_divisible_by=50304",) if CUDA else ()),
            f"evaluation.lengths=[{LENGTH},{4 * LENGTH}]",
            # One checkpoint is 18 GB.
            "checkpoint.keep=1",
        ),
    ),
}
"""The config of each part, and what is set otherwise."""
SAVES = 3
TOKENS = 65_536 if CUDA else 2048
"""Tokens that an evaluation scores."""
POLL_SECONDS = 0.005


class Product:
    """A run and what is made of it."""

    def __init__(self, part: str, work: Path) -> None:
        """Choose a run.

        Args:
            part: Which of RUNS.
            work: Where its files go.
        """
        self.config, given = RUNS[part]
        self.work, self.run, self.data = work, work / "run", work / "data"
        steps = next(int(each.partition("=")[2]) for each in given if "num_steps" in each)
        self.interval = steps // SAVES
        self.settings = [
            *given,
            f"run.directory={self.run}",
            f"data.directory={self.data}",
            "data.source=text",
            f"data.paths={json.dumps([str(ROOT / pattern) for pattern in TEXT])}",
            f"data.tokenizer={work / 'tokenizer.json'}",
            f"data.vocab_size={VOCABULARY}",
            "data.validation_fraction=0.05",
            f"checkpoint.interval_steps={self.interval}",
            f"evaluation.interval_steps={steps}",
            f"evaluation.max_tokens={TOKENS}",
            "schedule.lr_warmup_steps=2",
            "logging.interval_steps=1",
            "logging.wandb=disabled",
        ]
        self.steps: dict[str, Callable[[], Row]] = {
            "build the data": self.build,
            "train, SIGKILL within the second save": self.train_until_killed,
            "resume, and train to the end": self.resume,
            "evaluate": self.evaluate,
            "export, compared in stock transformers": self.export,
            "generate in stock transformers": self.generate,
        }

    def command(self, name: str, *arguments: object) -> list[str]:
        """Return the command line of `pretrain NAME`."""
        return [sys.executable, "-W", "ignore", "-m", "pretrain", name, *map(str, arguments)]

    def sets(self) -> list[str]:
        """Return the settings as options."""
        return [word for setting in self.settings for word in ("--set", setting)]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, as far as the run has come."""
        records = read_json_lines(self.run / "metrics.jsonl")
        return {r["step"]: r["loss_nats"] for r in records if "evaluation" not in r}

    def build(self) -> Row:
        """Train a byte-level tokenizer and build the data set with it."""
        files = [str(path) for pattern in TEXT for path in sorted(ROOT.glob(pattern))]
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
        )
        tokenizer.train(files, trainer)
        tokenizer.save(str(self.work / "tokenizer.json"))
        check([*self.command("data"), "build", str(self.config), *self.sets()])
        return {}

    def train_until_killed(self) -> Row:
        """Kill all of the run's processes while the second checkpoint is being written."""
        second = f".step-{2 * self.interval:08d}.*{PARTIAL}"
        command = self.command("train", self.config, *self.sets())
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        folder = self.run / "checkpoints"
        try:
            while process.poll() is None and not any(folder.glob(second)):
                time.sleep(POLL_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise SystemExit(f"`pretrain train` ended with code {process.returncode} by itself")
        # The run goes on writing over it.
        shutil.copy(self.run / "metrics.jsonl", self.work / "killed.jsonl")
        return {"last step": max(self.losses()), "checkpoints": self.checkpoints()}

    def resume(self) -> Row:
        """Run the same command again, and compare the steps that were taken twice."""
        killed = read_json_lines(self.work / "killed.jsonl")
        first = {r["step"]: r["loss_nats"] for r in killed if "evaluation" not in r}
        start = max(self.checkpoints())
        check(self.command("train", self.config, *self.sets()))
        again = self.losses()
        twice = [step for step in first if step > start]
        return {
            "resumed from": start,
            "steps taken twice": len(twice),
            "largest difference of their losses": max(
                (abs(first[step] - again[step]) for step in twice), default=0.0
            ),
            "last step": max(again),
            "last loss": again[max(again)],
        }

    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        return [int(path.name.partition("-")[2]) for path in complete_checkpoints(self.run)]

    def evaluate(self) -> Row:
        """Measure perplexity at the training length and beyond, in both protocols."""
        out = self.work / "report/curve.json"
        tokens = ("--max-tokens", TOKENS, "--protocols", "nonoverlapping")
        check(self.command("evaluate", self.run, "--out", out, *tokens))
        records = json.loads(out.read_text())["records"]
        return {f"perplexity at {r['length']}": r["perplexity"] for r in records}

    def export(self) -> Row:
        """Write a Hugging Face folder, which the command compares with the run by itself."""
        shutil.rmtree(self.work / "hf", ignore_errors=True)
        check(self.command("export", self.run, self.work / "hf"))
        size = sum(path.stat().st_size for path in (self.work / "hf").rglob("*"))
        return {"GiB": size / 2**30}

    def generate(self) -> Row:
        """Go on with a sentence, greedily and twice as far as the training length."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.work / "hf")
        model = AutoModelForCausalLM.from_pretrained(self.work / "hf", dtype=torch.float32)
        model = model.to("cuda" if CUDA else "cpu").eval()
        prompt = tokenizer("The learning rate is", return_tensors="pt").input_ids.to(model.device)
        done = model.generate(prompt, max_new_tokens=64, do_sample=False)
        return {"tokens": done.shape[1] - prompt.shape[1], "text": tokenizer.decode(done[0])[:80]}


def check(command: Sequence[str]) -> None:
    """Run a command line in the repository's root; end this process with its code if it fails."""
    if code := subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(code)


def main() -> None:
    """Take the steps that are left, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", required=True, choices=RUNS)
    parser.add_argument("--work", type=Path, help="Default: runs/gpu_day/PART of the repository.")
    arguments = parser.parse_args()
    rows = Rows(arguments.out, arguments.part)
    work = (arguments.work or ROOT / "runs/gpu_day" / arguments.part).resolve()
    work.mkdir(parents=True, exist_ok=True)
    product = Product(arguments.part, work)
    for name, step in product.steps.items():
        mark = work / f"{name}.done"
        if mark.exists():
            continue
        begin = time.monotonic()
        if step == product.train_until_killed:
            shutil.rmtree(product.run, ignore_errors=True)
        found = step()
        rows.add({"step": name, "seconds": round(time.monotonic() - begin, 1), **found})
        mark.touch()


if __name__ == "__main__":
    main()
