"""Measure what a long window costs under ALiBi, beside stock transformers with the same weights.

    python -m benchmarks.reach RUN HF_FOLDER [--lengths N,N,...] [--stock-up-to N] [--out FILE]

RUN is an ALiBi run and HF_FOLDER its export as an MPT. Every row is a process of its own on one
thread that scores the same tokens of the run's validation text, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pretrain
from benchmarks.gpu_day.results import markdown
from pretrain.data.stream import open_stream
from pretrain.evaluation import perplexity
from pretrain.evaluation.windows import ScoredText
from pretrain.kernels import sdpa

LENGTHS = (2048, 8192, 32768, 131072)
WAYS = ("ours", "ours, every key", "MPT", "Bloom")


def main() -> None:
    """Measure all rows, print them as Markdown and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("folder", type=Path, metavar="HF_FOLDER")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), metavar="N,N,...")
    parser.add_argument("--tokens", type=int, default=131072, help="Tokens to score in each row.")
    parser.add_argument("--data", help="The run's data set, where it was moved.")
    parser.add_argument(
        "--stock-up-to", type=int, default=8192, metavar="N",
        help="Longest windows of stock models and of ours with every key: their cost grows with "
        "the square, and stock attention stores all scores.",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="Also write the table to this Markdown file.")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        way, length = given.row.rsplit(":", 1)
        print(json.dumps(row(way, int(length), given)))
        return
    rows: list[dict[str, Any]] = []
    for length in map(int, given.lengths.split(",")):
        for way in WAYS:
            if way != "ours" and length > given.stock_up_to:
                continue
            command = [sys.executable, "-m", "benchmarks.reach", *sys.argv[1:]]
            child = subprocess.run(
                [*command, "--row", f"{way}:{length}"],
                stdout=subprocess.PIPE, text=True, check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )  # fmt: skip
            rows.append(json.loads(child.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    first: dict[str, float] = {}
    for each in rows:
        first.setdefault(each["way"], each["processor s"])
        each["times the shortest"] = each["processor s"] / first[each["way"]]
    text = (
        f"Machine: {os.cpu_count()} {platform.machine()} CPU cores, torch {torch.__version__} on "
        f"one thread, fp32. Every row scores {given.tokens:,} tokens in windows that do not "
        "overlap. Share of work: pairs of query and key that the kernel is given, of those under "
        "the causal mask.\n\n" + markdown(rows)
    )
    print(text)
    if given.out is not None:
        given.out.write_text(f"# Cost by window length under ALiBi\n\n{text}\n")


def row(way: str, length: int, given: argparse.Namespace) -> dict[str, Any]:
    """Score the text one way in this process."""
    torch.set_num_threads(1)
    pairs = count_pairs()
    seconds = 0.0
    ours = perplexity.Evaluator.evaluate

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal seconds
        begin = time.process_time()
        found = ours(self, *arguments, **named)
        seconds = time.process_time() - begin
        return found

    if way.startswith("ours"):
        perplexity.Evaluator.evaluate = timed  # type: ignore[method-assign]  # to time it alone
        if way == "ours, every key":
            sdpa.SKIPPED_FROM = sys.maxsize
        settings = {"data.directory": given.data} if given.data else {}
        (found,) = pretrain.evaluate(
            given.run, lengths=[length], protocols=["nonoverlapping"], max_tokens=given.tokens,
            settings=settings,
        )  # fmt: skip
    else:
        model, ids = stock(way, given.folder), validation_ids(given)
        begin = time.process_time()
        found = {"perplexity": stock_perplexity(model, ids, length)}
        seconds = time.process_time() - begin
    causal = given.tokens * (length + 1) // 2
    return {
        "length": length,
        "way": way,
        "processor s": seconds,
        "whole process s": time.process_time(),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "share of work": sum(pairs) / (causal * layers_and_heads(given.run)) if pairs else math.nan,
        "perplexity": f"{found['perplexity']:.6f}",
    }


def count_pairs() -> list[int]:
    """Return a list that gets the pairs of query and key of every call of torch's kernel."""
    pairs, kernel = [], sdpa.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        pairs.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return kernel(q, k, v, **options)

    sdpa.scaled_dot_product_attention = counted
    return pairs


def layers_and_heads(run: Path) -> int:
    """Return in how many heads of how many layers a pair counts."""
    model = pretrain.load_config(run / "config.toml").model
    return model.num_layers * model.num_attention_heads


def validation_ids(given: argparse.Namespace) -> Tensor:
    """Return the tokens that `pretrain evaluate` scores, the first of them as context."""
    settings = {"data.directory": given.data} if given.data else {}
    config = pretrain.load_config(given.run / "config.toml", settings)
    text = ScoredText(open_stream(config, "validation"), given.tokens)
    return torch.from_numpy(text.inputs(0, given.tokens))


@torch.no_grad()
def stock_perplexity(model: nn.Module, ids: Tensor, length: int) -> float:
    """Return exp of the mean loss in windows that do not overlap. ids: [T + 1]."""
    total = 0.0
    for first in range(0, len(ids) - 1, length):
        row = ids[first : first + length + 1].long()
        logits = model(input_ids=row[None, :-1]).logits[0]
        total += functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / (len(ids) - 1))


def stock(way: str, folder: Path) -> nn.Module:
    """Return transformers' model of an exported MPT, or a Bloom with the same weights.

    Bloom normalizes embeddings, which is taken out, and has biases, which are 0 here. Its GELU is
    another one by its tanh, which moves the perplexity by little.
    """
    import transformers

    mpt: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if way == "MPT":
        return mpt
    c = mpt.config
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            n_layer=c.n_layers,
            n_head=c.n_heads,
            eos_token_id=c.eos_token_id,
        )
    ).eval()
    for name, weight in bloom.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(weight)
    ours, theirs = mpt.transformer, bloom.transformer
    theirs.word_embeddings_layernorm = nn.Identity()
    heads, width = c.n_heads, c.d_model // c.n_heads

    def copy(to: Any, of: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        to.weight.data.copy_(change(of.weight.data))

    copy(theirs.word_embeddings, ours.wte)
    copy(theirs.ln_f, ours.norm_f)
    for to, of in zip(theirs.h, ours.blocks):
        copy(to.input_layernorm, of.norm_1)
        copy(to.post_attention_layernorm, of.norm_2)
        copy(
            to.self_attention.query_key_value,
            of.attn.Wqkv,
            lambda x: x.view(3, heads, width, -1).transpose(0, 1).reshape(x.shape),
        )
        copy(to.self_attention.dense, of.attn.out_proj)
        copy(to.mlp.dense_h_to_4h, of.ffn.up_proj)
        copy(to.mlp.dense_4h_to_h, of.ffn.down_proj)
    return bloom


if __name__ == "__main__":
    main()
