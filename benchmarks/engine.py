"""The command ``bench engine``: the worker's half of the vLLM connector over tensors laid out as vLLM lays them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.table import Table

from tierstore.bench.engine_copies import engine_rows, host_nbytes
from tierstore.bench.engine_tensors import LAYOUTS, Shape
from tierstore.bench.link import Ceiling, device_of
from tierstore.cli.bench import name_of
from tierstore.cli.output import print_json, progress, refusals, require_memory, wide_console
from tierstore.config import format_size
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.bench.engine_copies import EngineRow
    from tierstore.bench.engine_tensors import Layout


def run(
    *,
    device: str,
    blocks: int,
    layouts: str,
    layers: int,
    heads: int,
    dim: int,
    block_size: int,
    pairs: int,
    as_json: bool,
) -> None:
    """Run the command with the options of ``tierstore bench engine``."""
    found: list[EngineRow] = []
    with refusals(as_json):
        shape = Shape(layers, heads, dim, block_size)
        wanted = _layouts_of(layouts) if layouts else LAYOUTS
        device_of(device)
        require_memory({"--blocks": blocks * shape.block_nbytes}, host_nbytes(device, shape, blocks))
        ceiling = Ceiling(device, blocks * shape.block_nbytes)
        for layout in wanted:
            progress.print(f"layout {layout}")
            found += engine_rows(device, shape, blocks, pairs, ceiling, [layout])
    name = name_of(device)
    header = ("layout", "way", "piece", "pieces", "GB/s", "ceiling", "ratio", "worker ms", "share", "path")
    table = Table(*header, box=None, title=name)
    for row in found:
        rates = (f"{row.gbps:.2f}", f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        worker = (f"{row.worker_ms:.1f}", f"{row.worker_share:.3f}")
        sizes = (format_size(row.piece_bytes), str(row.num_pieces))
        table.add_row(row.layout, row.direction, *sizes, *rates, *worker, row.path)
    wide_console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _layouts_of(text: str) -> list[Layout]:
    """ConfigError for a name that is none."""
    names = text.split(",")
    for name in names:
        if name not in LAYOUTS:
            raise ConfigError(f"--layouts {name}; allowed: {', '.join(LAYOUTS)}")
    return cast("list[Layout]", names)
