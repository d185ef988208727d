"""What the server of forked commands imports, once (tests/end_to_end/commands.py)."""

import importlib
import os
import warnings

# A process that has looked for a GPU cannot be forked into one that uses it: the forked commands run on the CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")

for name in (
    "deepspeed.ops",
    "transformers.models.bloom.modeling_bloom",
    "pretrain.data.build",
    "pretrain.train.loop",
    "pretrain.train.bench",
    "pretrain.evaluate.command",
    "pretrain.export.command",
):
    importlib.import_module(name)
