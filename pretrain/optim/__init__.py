"""The optimizer: DeepSpeed ZeRO, gradient reductions, optimizer state and the learning rate.

This is the only package that knows DeepSpeed's attributes (tests/unit/test_leaks.py). The rest of
the project uses the methods of `ZeroOptimizer`, so a new DeepSpeed version is dealt with here.
"""

# First, because a run's config holds one of the classes of `optimizers`, which are its sections.
import pretrain.config  # noqa: F401
