"""Pretrain GPTs with ALiBi attention at a short length and test them at longer ones.

Models run in any tensor x pipeline x data-parallel layout (Megatron-core), with the optimizer state
sharded by DeepSpeed ZeRO. The commands are `pretrain` (pretrain.cli.commands) and `launcher`
(pretrain.launcher.cli). This file imports nothing heavy, so that either command can refuse a wrong
config without waiting for torch.
"""

from pretrain.lean_imports import install

install()
