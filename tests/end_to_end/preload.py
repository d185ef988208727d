"""Import, once, what the forked commands need (see tests/end_to_end/commands.py)."""

import gc
import importlib
import os
import warnings

# CUDA cannot be used in a process forked from one that has initialized it. The commands run on the
# CPU.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
# What is imported stays. Collections would look for garbage in it for a fifth of the time.
gc.disable()
warnings.simplefilter("ignore")

for name in (
    "deepspeed.ops",
    "transformers.models.mpt.modeling_mpt",
    "pretrain.cli.commands",
    "pretrain.launcher.cli",
    "pretrain.data.build",
    "pretrain.training.loop",
    "pretrain.bench.timing",
    "pretrain.evaluation.command",
    "pretrain.huggingface.export",
    "pretrain.study.command",
    "pretrain.study.report",
    "tests.end_to_end.forks",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "wandb.sdk.launch",
):
    try:
        importlib.import_module(name)
    except ImportError as error:
        # multiprocessing would pass over it, and every command would make its imports by itself.
        raise RuntimeError(f"{__file__}: {error}") from error
# In a forked process, a collection that looks at all of it takes 0.2 s.
gc.freeze()
gc.enable()
