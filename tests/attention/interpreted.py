"""The attention kernels run by Triton's interpreter: NumPy on ordinary memory, no card."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import triton
from triton.language import standard

import tierstore.gpu.attention

KERNELS = Path(tierstore.gpu.attention.__file__).with_name("kernels.py")


def interpreted(path: Path = KERNELS) -> ModuleType:
    """A module of kernels of its own, from the file, which must stay there as long as they are used."""
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
