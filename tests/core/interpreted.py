"""Runs the coding kernels in Triton's interpreter, with NumPy on ordinary memory and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import triton
from triton.language import standard

KERNELS = "tierstore.gpu.quant.codec_kernels"


def interpreted(instead: Mapping[str, Path] | None = None) -> ModuleType:
    """Return a second copy of the module ``codec_kernels`` whose kernels are interpreted.

    The original module is not affected, whether it is imported or not.

    Args:
        instead: Source files to use instead of the modules' own, by module name. Each file must exist as long as
            the kernels are used.
    """
    own = find_spec(KERNELS)
    assert own is not None
    path = own.origin if instead is None else instead[KERNELS]
    spec = spec_from_file_location("codec_kernels_interpreted", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    # The interpreter runs reductions with these two functions in NumPy, and others element by element.
    vars(module).update(larger=standard._elementwise_max, smaller=standard._elementwise_min)
    return module
