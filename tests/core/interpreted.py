"""The coding kernels run by Triton's interpreter: NumPy on ordinary memory, no card."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import triton
from triton.language import standard

NUMBERS, KERNELS = "tierstore.gpu.coding_numbers", "tierstore.gpu.coding_kernels"
FETCHING = "tierstore.gpu.mapped_kernel"


def interpreted(instead: Mapping[str, Path] | None = None) -> ModuleType:
    """A second ``coding_kernels`` whose kernels are interpreted; the first stays as it is, imported or not.

    ``instead``: files to take for one of the two modules, which must stay there as long as the kernels are used.
    """
    return _interpreted(KERNELS, instead or {})


def interpreted_fetching(instead: Mapping[str, Path] | None = None) -> ModuleType:
    """The same of ``mapped_kernel``."""
    return _interpreted(FETCHING, instead or {})


def _interpreted(wanted: str, instead: Mapping[str, Path]) -> ModuleType:
    before = {name: sys.modules.pop(name, None) for name in (NUMBERS, wanted)}
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            numbers, kernels = (_load(name, instead.get(name)) for name in (NUMBERS, wanted))
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    for module in (numbers, kernels):  # the interpreter reduces these two by NumPy, others number by number
        vars(module).update(larger=standard._elementwise_max, smaller=standard._elementwise_min)
    return kernels


def source_of(name: str) -> str:
    """Of one of the two modules."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _load(name: str, path: Path | None) -> ModuleType:
    spec = find_spec(name) if path is None else spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
