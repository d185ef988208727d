"""Measure speed and memory of training, evaluation and generation.

When they are imported, Megatron and DeepSpeed warn about optional packages, a screenful for each
process. Processes that import this package first, as those of a turn do, do not print the warnings.
"""

import warnings

warnings.simplefilter("ignore")
