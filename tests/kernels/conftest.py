"""Let Triton's interpreter do once what it repeats at each device function and operation."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy
import torch

if not torch.cuda.is_available():
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    # A launch gives triton.language the functions of the interpreter, and takes them back. Each
    # device function that it calls would do so again, by listing all members of these modules: a
    # third of the time of these tests. To make the table of types at each operation takes a tenth.
    modules = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    prepare = interpreter._patch_lang
    tl.pointer_type.__hash__ = tl.block_type.__hash__ = tl.dtype.__hash__

    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a device function."""
        return self.rewrite()(*args, **kwargs)

    # Half of the rest are types of blocks, made anew for each result, and sums and products of
    # integers, repeated in 64 bits by eight of Triton's operations to see that none overflows.
    new_type, types_made = tl.block_type.__init__, dict[Any, dict[str, Any]]()
    exactly = {"add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply}

    def _new_type(self: Any, element_type: tl.dtype, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = element_type.name, *sizes
        if key not in types_made:
            new_type(self, element_type, shape)
            shape = tl.tuple([tl.constexpr(size) for size in sizes])
            types_made[key] = vars(self) | {"of_tensor": (shape, tl.constexpr(self.numel))}
        vars(self).update(types_made[key])

    def _new_tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else (no_sizes, one)

    def _check_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
        type_, operands = left.type.scalar, (left.handle.data, right.handle.data)
        if type_.int_bitwidth < 64:
            result = exactly[operation.__name__](*(x.astype(numpy.int64) for x in operands))
            least, most = type_.get_int_min_value(), type_.get_int_max_value()
            assert least <= result.min() and result.max() <= most, f"{type_} overflows"

    no_sizes, one = tl.tuple([]), tl.constexpr(1)
    tl.block_type.__init__, tl.tensor.__init__ = _new_type, _new_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter._patch_lang = lambda function: prepare(modules)
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
