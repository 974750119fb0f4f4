"""The picture of what codecs save against how far they move a model. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierstore.bench.fidelity import CodecRow


def draw(rows: Sequence[CodecRow], floor: float, source: str, file: Path) -> None:
    """Write ratio against divergence to ``file``, of the form its suffix names. OSError if it cannot be written.

    Lossless codecs stand on the lower edge: their divergence is 0. ValueError for a suffix matplotlib does not know.
    """
    from matplotlib.figure import Figure  # no pyplot: no state, no display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    found = [(row.codec, row.ratio, row.kl) for row in rows if row.kl is not None]
    edge = min([floor, *(kl for _, _, kl in found if kl > 0)]) / 3
    for name, ratio, kl in found:
        height = max(kl, edge)
        axes.plot(ratio, height, "o" if kl > 0 else "v", color="C0")
        axes.annotate(name, (ratio, height), xytext=(5, 5), textcoords="offset points")
    axes.axhline(floor, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        "bfloat16 read in pieces", (1, floor), xytext=(2, 3), textcoords="offset points", color="0.4"
    )
    axes.set(
        yscale="log", xlabel="raw bytes by stored bytes", ylabel="mean KL divergence, nats", title=source
    )
    axes.margins(x=0.12, y=0.15)
    figure.savefig(file)
