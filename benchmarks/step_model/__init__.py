"""A model of the time of a training step, from operations, bytes and bandwidths.

    python -m benchmarks.step_model [--update docs/performance.md]

No GPU could be used while this was written, so the model says beforehand what one should measure:
each line of a step is a class of work that `python -m benchmarks.gpu_day` times apart, and each
input carries its origin, so that a measurement confirms or refutes it line by line. Only the
standard library and `pretrain.config` are needed.

"Before" is DeepSpeed's own step and no fusion; "after" has overlapped reductions in buckets, a
sharded fused optimizer step and fused elementwise operations.
"""
