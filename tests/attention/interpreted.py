"""The attention kernels run by Triton's interpreter: NumPy on ordinary memory, no card."""

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
    """A module of kernels of its own.

    ``instead``: a file to take for it, by its name; the file must stay there as long as the kernels are used.
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
    # The interpreter reduces these two by NumPy, others number by number.
    vars(module).update(larger=standard._elementwise_max, added=standard._sum_combine)
    return module


_dot = InterpreterBuilder.create_dot


def _dot_of_bfloat16(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter's own multiplies the bits of bfloat16 as integers (Triton 3.7)."""
    return _dot(builder, _widened(a), _widened(b), *rest)


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


InterpreterBuilder.create_dot = _dot_of_bfloat16
