"""Attention with linear biases: who serves which case, and the dense oracle they are held against."""

from kernels.alibi import alibi_slopes
from kernels.dispatch import attention
from kernels.reference import attention_reference

__all__ = ["alibi_slopes", "attention", "attention_reference"]
