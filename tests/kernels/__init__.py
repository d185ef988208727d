"""Test the kernels against the dense reference, other libraries and literal values."""
