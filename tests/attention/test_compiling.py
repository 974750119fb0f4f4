"""Test that the kernels compile for GPUs that need not be present, and fit the shared memory of those GPUs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.attention.cases import Case
from tests.support import lanes
from tierstore.gpu.attention import kernels
from tierstore.gpu.attention.in_place import Tiles, constants_of
from tierstore.gpu.attention.page_table import Shape

# Triton 3.9 warns once per process that the default will change. These tests pass with either default.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS = {"table": "*i32", "items": "*i32", "lse": "*fp32", "parts": "*fp32", "part_lse": "*fp32"}

LLAMA = Case([], num_kv_heads=8, group=4, head_dim=128, page_size=64, dtype=torch.bfloat16)
GEMMA = Case([], num_kv_heads=1, group=4, head_dim=256, window_left=511, dtype=torch.bfloat16)
SMOL = Case([], num_kv_heads=3, group=3, head_dim=64)
PHI = Case([], num_kv_heads=32, group=1, head_dim=96, page_size=64, dtype=torch.bfloat16)
LATENT = Case([], num_kv_heads=1, group=128, head_dim=576, value_dim=512, page_size=64, dtype=torch.bfloat16)


def shared_memory(shape: Shape, tiles: Tiles, planes: int, capability: int) -> int:
    """Compile the kernel and return the shared memory that it uses, in bytes."""
    known = constants_of(shape, tiles, planes)
    words = {**POINTERS, "q": WORDS[shape.dtype], "kv": WORDS[shape.dtype], "out": WORDS[shape.out_dtype]}
    words |= {"scale": "fp32"}
    names = kernels.attend.arg_names
    signature = {name: "constexpr" if name in known else words.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in known.items()}
    aligned = [name for name in names if name not in known and name not in ("scale", "window", "items")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiled = triton.compile(
        ASTSource(kernels.attend, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    return int(compiled.metadata.shared)


@pytest.mark.parametrize(
    ("case", "rows"),
    # Tiles for one new token per sequence, for many new tokens with large heads, and for latents
    lanes.some(
        [(LLAMA, 4), (LLAMA, 256), (GEMMA, 256), (SMOL, 256), (PHI, 1), (PHI, 256), (LATENT, 128)],
        lambda case, rows: (case, rows) in ((LLAMA, 4), (GEMMA, 256), (LATENT, 128)),
    ),
    ids=["llama", "llama, many", "gemma, many", "smol, many", "phi", "phi, many", "latent"],
)
@pytest.mark.parametrize(
    ("capability", "room"), [(90, 227 << 10), pytest.param(80, 99 << 10, marks=pytest.mark.deep)]
)
def test_tiles_fit_the_cards_shared_memory(case: Case, rows: int, capability: int, room: int) -> None:
    tiles = Tiles.of(case.shape, rows, large=capability == 90)
    planes = 2 if case.value_dim is None else 1
    assert shared_memory(case.shape, tiles, planes, capability) <= room
