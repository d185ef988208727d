"""Measure speed and memory of training, evaluation and generation.

Megatron and DeepSpeed warn about optional packages when they are imported, a screenful for each
process. Whoever imports this package first, as the processes of a turn do, does not see them.
"""

import warnings

warnings.simplefilter("ignore")
