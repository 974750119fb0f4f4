"""Plots hit rate against capacity, with one line for each policy and one for the bound.

This module needs matplotlib, which the extra ``plot`` installs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure  # not pyplot, because it has global state and may need a display

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierstore.replay.simulation import Row


def require_format(file: Path) -> None:
    """Raise ConfigError if matplotlib does not support the suffix of ``file``."""
    known = sorted(f".{name}" for name in FigureCanvasBase.get_supported_filetypes())
    if file.suffix not in known:
        raise ConfigError(f"--plot {file} must end in one of {', '.join(known)}, got {file.suffix!r}")


def draw(rows: Sequence[Row], file: Path) -> None:
    """Plot the rows, one panel per trace, and write the plot to ``file`` in the format that its suffix names.

    Raises:
        OSError: The file cannot be written.
    """
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(7.5 * len(traces), 4.5), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        mine = [row for row in rows if row.trace == trace]
        best = {row.capacity_bytes: row.optimal_hit_rate for row in mine}
        axes.plot(*_line(best), "k--", label="knows the future")
        for policy in dict.fromkeys(row.policy for row in mine):
            found = {row.capacity_bytes: row.hit_rate for row in mine if row.policy == policy}
            axes.plot(*_line(found), "o-", label=policy)
        axes.set(
            xscale="log", title=trace, xlabel="capacity, GiB", ylabel="prefix-hit tokens / tokens requested"
        )
        axes.set_ylim(bottom=0)
        sizes = _line(best)[0]
        axes.set_xticks(sizes, labels=[f"{size:.4g}" for size in sizes])
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file)


def _line(points: dict[int, float]) -> tuple[list[float], list[float]]:
    sizes = sorted(points)
    return [size / (1 << 30) for size in sizes], [points[size] for size in sizes]
