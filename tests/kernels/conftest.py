"""Let Triton's interpreter prepare itself once a launch, and not again at each device function."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

if not torch.cuda.is_available():
    import triton.language as tl
    from triton.runtime import interpreter

    # A launch gives triton.language the functions of the interpreter, and takes them back. Each
    # device function that it calls would do so again, by listing all members of these modules: a
    # third of the time of these tests. To make the table of types at each operation takes a tenth.
    modules = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    prepare, of_scalar = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype(tl.pointer_type(tl.int8))

    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a device function."""
        return self.rewrite()(*args, **kwargs)

    def _numpy_type(type_: tl.dtype) -> Any:
        return of_pointer if type_.scalar.is_ptr() else of_scalar(type_.scalar)

    interpreter._patch_lang = lambda function: prepare(modules)
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _numpy_type
