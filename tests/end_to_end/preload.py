"""Import, once, what the forked commands need (see tests/end_to_end/commands.py)."""

import importlib
import os
import warnings

# CUDA cannot be used in a process forked from one that has initialized it. The commands run on the
# CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")

for name in (
    "deepspeed.ops",
    "transformers.models.mpt.modeling_mpt",
    "pretrain.data.build",
    "pretrain.train.loop",
    "pretrain.bench.training",
    "pretrain.evaluate.command",
    "pretrain.huggingface.export",
):
    importlib.import_module(name)
