"""Run the attention kernels in Triton's interpreter, which uses NumPy and needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import triton
from triton import language as tl
from triton.language import standard
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

KERNELS = "tierstore.gpu.attention.kernels"


def interpreted(instead: Mapping[str, Path] | None = None) -> ModuleType:
    """Return a new module that contains the kernels and runs them in Triton's interpreter.

    Args:
        instead: Source files to use in place of the package's own, by module name. The file of the kernels must exist
            as long as they are used.
    """
    own = find_spec(KERNELS)
    assert own is not None
    path = own.origin if instead is None else instead[KERNELS]
    spec = spec_from_file_location("attention_kernels_interpreted", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    # The interpreter runs reductions by these two functions in NumPy, and all other reductions element by element.
    vars(module).update(larger=standard._elementwise_max, added=standard._sum_combine)
    return module


_dot = InterpreterBuilder.create_dot


def _dot_of_bfloat16(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Convert bfloat16 to float32 first, because the interpreter of Triton 3.7 multiplies its bits as integers."""
    return _dot(builder, _widened(a), _widened(b), *rest)


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


InterpreterBuilder.create_dot = _dot_of_bfloat16
