"""What the benchmark of first tokens is asked for, and whether there is room for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierstore.bench.link import device_of
from tierstore.bench.ttft_rig import SHAPES
from tierstore.errors import ConfigError
from tierstore.gpu.device import open_device
from tierstore.host.memory import available_nbytes
from tierstore.units import format_size

CHUNKS = (65536, 16384)
"""Tokens computed at a time where nothing is stored: the first where a card has room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is measured. ``prefix`` and ``question`` in tokens; a prefix is cut to full pages."""

    device: str
    shape: str
    prefix: int
    question: int
    page_size: int
    rounds: int

    @property
    def weights_nbytes(self) -> int:
        """Of the model."""
        return SHAPES[self.shape].weights_nbytes

    def pages_nbytes(self, prefix: int) -> int:
        """Of all pages of a prompt with this prefix, and one more."""
        sizes = SHAPES[self.shape]
        token = sizes.layers * 2 * sizes.kv_heads * sizes.head_dim * 2
        pages = -(-(prefix + self.question) // self.page_size) + 1
        return pages * self.page_size * token

    def require_room(self, disk_prefix: int) -> None:
        """ConfigError, before anything is made, if the model and the pages of HBM and HOST do not fit in memory."""
        pages = self.pages_nbytes(max(self.prefix, disk_prefix))
        upper = self.weights_nbytes + pages
        free = open_device(self.device).available_nbytes()
        if free is not None:
            self._require("on the device", upper, free)
        self._require("of memory", pages + (upper if free is None else 0), available_nbytes())

    def chunk(self, disk_prefix: int) -> int:
        """The largest of ``CHUNKS`` that the device has room for beside the model and the pages; else the last."""
        free = open_device(self.device).available_nbytes()
        upper = self.weights_nbytes + self.pages_nbytes(max(self.prefix, disk_prefix))
        left = 0 if free is None else free - upper
        return next((n for n in CHUNKS if SHAPES[self.shape].chunk_nbytes(n) <= left), CHUNKS[-1])

    def _require(self, where: str, needed: int, available: int | None) -> None:
        if available is None or needed <= available:
            return
        raise ConfigError(
            f"--shape {self.shape} has weights of {format_size(self.weights_nbytes)}, and with the pages of "
            f"--prefix {self.prefix} needs {format_size(needed)} {where}; {format_size(available)} are available; "
            "allowed: a smaller --prefix, or --shape tiny"
        )

    def prompt(self, prefix: int) -> torch.Tensor:
        """The same tokens each time, ``[1, prefix + question]``."""
        chance = torch.Generator().manual_seed(7)
        whole = prefix // self.page_size * self.page_size + self.question
        words = torch.randint(0, SHAPES[self.shape].vocabulary, (1, whole), generator=chance)
        return words.to(device_of(self.device))
