"""The coding kernels run by Triton's interpreter: NumPy on ordinary memory, no card."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import triton
from triton.language import standard


def _file() -> Path:
    spec = find_spec("tierstore.gpu.quant.codec_kernels")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


KERNELS = _file()


def interpreted(path: Path = KERNELS) -> ModuleType:
    """A second ``codec_kernels`` whose kernels are interpreted; the first stays as it is, imported or not.

    ``path``: the file to take for it, which must stay there as long as the kernels are used.
    """
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
