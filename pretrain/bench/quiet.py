"""Hide warnings in the process that imports this module, from here on.

The server of `pretrain.bench.turns` imports it first. Megatron and DeepSpeed warn about optional
packages when they are imported, a screenful that `pretrain.cli.main` hides in the command itself.
"""

import warnings

warnings.simplefilter("ignore")
