"""Tests of ``import tierstore``: its public names, and the modules that it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import prefetch
import tierstore

HEAVY = ("torch", "lmdb", "numpy", "pydantic", "yaml", "xxhash", "transformers", "asyncio")


def test_the_public_names_are_sorted_and_each_is_there() -> None:
    assert tierstore.__all__ == sorted(tierstore.__all__)
    for name in tierstore.__all__:
        assert getattr(tierstore, name) is not None
    assert set(tierstore.__all__) <= set(dir(tierstore))


def test_the_names_of_the_contract_are_public() -> None:
    names = (
        "TierStore PageSpec PageKey Tier Match Lease LeaseState Hint HintResult FlushResult EnginePages PageChange "
        "StoreConfig Traffic Watch load_config"
    )
    errors = "TierStoreError ArchiveError ConfigError CapacityError TransferError IntegrityError LeaseError StoreClosed"
    assert set(tierstore.__all__) == {*names.split(), *errors.split()}


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        _ = getattr(tierstore, "Manager" + "")


@pytest.mark.parametrize(
    "statement", ["import tierstore", "import prefetch", "import tierstore; tierstore.PageSpec"]
)
def test_importing_a_package_loads_no_heavy_module(statement: str) -> None:
    program = f"import sys; {statement}; print([name for name in {HEAVY!r} if name in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert child.stdout.strip() == "[]"


def test_reading_a_configuration_loads_neither_torch_nor_lmdb() -> None:
    program = "import sys, tierstore; tierstore.load_config({}); print({'torch', 'lmdb'} & set(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert child.stdout.strip() == "set()"


def test_packages_contain_py_typed() -> None:
    for package in (tierstore, prefetch):
        assert [(Path(folder) / "py.typed").exists() for folder in package.__path__] == [True]
