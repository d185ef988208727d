"""Kernels against the dense oracle and against literal values."""
