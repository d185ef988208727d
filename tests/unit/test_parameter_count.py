"""Test the closed-form parameter counts against the model itself.

The model is built on the meta device, for ranks of layouts of 128 processes.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pretrain.config import load_config, num_parameters, num_parameters_of_rank

# Uses torch's fake process group: this process acts as each of several ranks of 128 in turn. fp16
# is refused on a CPU, but nothing is computed here.
SCRIPT = """
import json, sys, warnings; warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from pretrain import platform
from pretrain.config import load_config
from pretrain.topology import Process, finish, initialize
path, overrides, ranks = json.loads(sys.argv[1])
platform.check_precision = lambda precision: None
config = load_config(path, overrides)
counts = {}
for rank in ranks:
    dist.init_process_group("fake", rank=rank, world_size=128, store=FakeStore())
    topology = initialize(config, Process(rank, 128, 0, "127.0.0.1", 0))
    from pretrain.model.gpt import build_model
    from pretrain.model.parameters import named_parameters
    chunks = build_model(config, device=torch.device("meta"))
    named = list(named_parameters(chunks))
    assert all(n.parameter.is_meta for n in named)
    counts[rank] = [topology.pipeline_rank, sum(n.parameter.numel() for n in named)]
    finish()
print(json.dumps(counts))
"""
PATH = "configs/cc100_roberta/alibi_1024.toml"
LAYOUTS = {
    "as published": [],
    "tp8": ["parallel.tensor_model_parallel_size=8"],
    "tp2 x pp4, uneven": [
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=4",
    ],
    "tp4 x pp8, uneven, untied": [
        "parallel.tensor_model_parallel_size=4",
        "parallel.pipeline_model_parallel_size=8",
        "model.tie_word_embeddings=false",
    ],
    "pp2, interleaved by 4, t5, embedding norm": [
        "parallel.pipeline_model_parallel_size=2",
        "position.method=t5",
        "parallel.virtual_pipeline_model_parallel_size=4",
        "model.embedding_layernorm=true",
        "model.parallel_residual=true",
    ],
    "the 247M of WikiText-103": [
        "model.num_layers=16",
        "model.hidden_size=1024",
        "model.num_attention_heads=8",
        "model.ffn_hidden_size=4096",
        "model.use_bias=true",
        "data.vocab_size=267744",
        "model.make_vocab_size_divisible_by=8",
        "model.adaptive_cutoffs=[20000,60000]",
        "model.final_layernorm=false",
    ],
    "tp2 x pp2, no final norm": [
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
        "model.final_layernorm=false",
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_of_ranks_of_128(layout):
    overrides = LAYOUTS[layout]
    config = load_config(PATH, overrides)
    pipeline = config.parallel.pipeline_model_parallel_size
    ranks = sorted({stage * 128 // pipeline for stage in range(pipeline)} | {127})
    command = [sys.executable, "-c", SCRIPT, json.dumps([PATH, overrides, ranks])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) == len(ranks)
    for stage, count in counts.values():
        assert count == num_parameters_of_rank(config, stage)
    if config.model.adaptive_cutoffs is not None:
        # The number that fairseq's 16-layer model of the architecture transformer_lm_wiki103 prints
        # is in its examples/layerdrop/README.md.
        assert num_parameters(config) == 246_933_504
    if pipeline == 1 and config.parallel.tensor_model_parallel_size == 1:
        assert counts["0"][1] == num_parameters(config)
