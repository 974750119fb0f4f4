"""The coding kernels run by Triton's interpreter: NumPy on ordinary memory, no card."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import triton
from triton.language import standard

KERNELS = "tierstore.gpu.quant.codec_kernels"


def interpreted(instead: Mapping[str, Path] | None = None) -> ModuleType:
    """A second ``codec_kernels`` whose kernels are interpreted; the first stays as it is, imported or not.

    ``instead``: a file to take for it, by its name; the file must stay there as long as the kernels are used.
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
    # The interpreter reduces these two by NumPy, others number by number.
    vars(module).update(larger=standard._elementwise_max, smaller=standard._elementwise_min)
    return module
