"""What somebody meets who has just installed TierStore: names, versions, and sizes in messages."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

import tierstore
from tierstore.config import exact_size
from tierstore.page import PageSpec


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB (1,024 bytes)"),
        (989560464998400, "900 TiB (989,560,464,998,400 bytes)"),
    ],
)
def test_a_size_in_a_message_is_short_and_exact(nbytes: int, text: str) -> None:
    assert exact_size(nbytes) == text


def test_the_version_is_that_of_the_distribution() -> None:
    assert tierstore.__version__ == version("tierstore")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8"])
def test_a_spec_takes_torchs_dtype_as_its_name(dtype: str) -> None:
    def spec(given: object) -> PageSpec:
        return PageSpec(
            num_layers=1,
            page_size=4,
            num_kv_heads=1,
            head_dim=8,
            dtype=given,  # type: ignore[arg-type]
            model="m",
        )

    assert spec(getattr(torch, dtype)) == spec(dtype)
    assert spec(getattr(torch, dtype)).fingerprint == spec(dtype).fingerprint
    with pytest.raises(ValueError, match=r"dtype must be one of .* got 'complex64'"):
        spec(torch.complex64)
