"""What the server of forked commands imports once (tests/end_to_end/commands.py)."""

import os
import warnings

# A process that has found a GPU cannot be forked into one that uses it: the forked commands run on the CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")

import deepspeed.ops  # noqa: E402, F401
import transformers.models.bloom.modeling_bloom  # noqa: E402, F401

import pretrain.data.build  # noqa: E402, F401
import pretrain.evaluate.command  # noqa: E402, F401
import pretrain.export.command  # noqa: E402, F401
import pretrain.train.bench  # noqa: E402, F401
import pretrain.train.loop  # noqa: E402, F401
