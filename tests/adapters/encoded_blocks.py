"""Helpers that copy blocks of vLLM, in KV tensors of any layout, to encoded host memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.pages import PATIENCE_S, chain
from tierstore import codecs
from tierstore.adapters.vllm.config import Settings
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.adapters.vllm.kv_layout import KVLayout, kv_layout
from tierstore.adapters.vllm.messages import Orders
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.gpu.engine_pages import EnginePool
from tierstore.page import PageLayout
from tierstore.types import Ack, Tier, Transfer

SIZES = {"B": 6, "L": 3, "H": 4, "N": 16}
"""Sizes of the tensors: blocks, layers, heads and tokens per block."""
MHA, ODD, MLA = Heads(2, 64, "bfloat16"), Heads(2, 80, "bfloat16"), Heads(1, 192, "bfloat16")


def tensors_of(order: str, heads: Heads, device: str) -> list[torch.Tensor]:
    """Allocate KV tensors with the dimensions in this order. Return a view ``[B, H, N, C]`` of each layer.

    Magnitudes differ so much between keys and values, tokens and heads that no two of them can share a scale.
    """
    rows = [SIZES[letter] for letter in "LBHN"] + [heads.planes]
    dice = torch.Generator().manual_seed(1)
    magnitudes = torch.rand(*rows, 1, generator=dice).mul_(20.0).sub_(10.0).exp_()
    numbers = torch.randn(*rows, heads.dim, generator=dice).mul_(magnitudes).flatten(-2)
    sizes = [SIZES[letter] for letter in order.removesuffix("C")] + [heads.planes * heads.dim]
    whole = torch.empty(sizes, dtype=torch.bfloat16, device=device)
    logical = whole.permute([order.index(letter) for letter in "LBHNC"])
    logical.copy_(numbers)
    return list(logical)


def layout_of(tensors: Sequence[torch.Tensor], heads: Heads) -> KVLayout:
    return kv_layout(
        tensors, num_blocks=SIZES["B"], block_size=SIZES["N"], identity="m", shard=0, heads=heads
    )


@dataclass
class Coded:
    """A worker half with ``host.codec: int8``, and the KV tensors whose blocks it copies."""

    half: WorkerHalf
    tensors: list[torch.Tensor]
    found: KVLayout
    last_id: int = 0

    @classmethod
    def of(cls, tensors: list[torch.Tensor], heads: Heads) -> Coded:
        device = "cpu" if tensors[0].device.type == "cpu" else "cuda:0"
        found = layout_of(tensors, heads)
        settings = Settings.of({"config": {"host": {"capacity": 8 << 20, "codec": "int8"}}})
        return cls(WorkerHalf.open(settings.of_rank(1, None, device), found, 0), tensors, found)

    def copy(self, src: Tier, src_slots: tuple[int, ...], dst: Tier, dst_slots: tuple[int, ...]) -> Ack:
        """Copy pages in a step of the engine, and return the ack."""
        self.last_id += 1
        keys = tuple(chain(len(src_slots)))
        parents = (None, *keys[:-1])
        command = Transfer(self.last_id, keys, src, src_slots, dst, dst_slots, 0, parents)
        self.half.begin(Orders(before=(command,)))
        self.half.end()
        deadline = monotonic() + PATIENCE_S
        while monotonic() < deadline:
            report = self.half.report()
            if report is not None and report.acks[0]:
                (ack,) = report.acks[0]
                return ack
        raise AssertionError("the copy has not ended")

    def held(self, slot: int) -> bytes:
        """Return the payload in a slot of host memory."""
        arena = self.half._arena
        return arena.view(slot)[: arena.held.payload_nbytes].tobytes()


def coded_on_cpu(
    tensors: Sequence[torch.Tensor], heads: Heads, block: int
) -> tuple[bytes, list[torch.Tensor]]:
    """Encode and decode a block on the CPU. Return the payload, and the decoded block of each layer ``[H, N, C]``."""
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.cpu()) for t in tensors]
    found = layout_of(copies, heads)
    layout = PageLayout.of(found.spec)
    pool = EnginePool(layout, (found.pages,))
    encoder, decoder = codecs.encoder("int8", layout), codecs.decoder("int8", layout)
    assert encoder is not None
    assert decoder is not None
    page: NDArray[np.uint8] = np.zeros(layout.blob_nbytes, dtype=np.uint8)
    out, back = np.zeros_like(page), np.zeros_like(page)
    pool.read(block, page)
    length = encoder.encode(page, out)
    assert length is not None
    decoder.decode(out[:length], back)
    pool.write(block, back)
    return out[:length].tobytes(), [layer[block] for layer in copies]
