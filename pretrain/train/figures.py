"""Draw the figure that an evaluation in the training loop sends to W&B and TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pretrain.rundir.metrics import Record

if TYPE_CHECKING:
    # Importing matplotlib takes a second, which a run that draws nothing should not pay.
    from matplotlib.figure import Figure


def length_picture(records: Sequence[Record], train_length: int) -> NDArray[np.uint8]:
    """Return the figure of `length_curve` as pixels [height, width, RGB].

    W&B and TensorBoard both take figures as well, but by way of matplotlib.pyplot, which chooses a
    backend by what is installed and shown on this machine.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(length_curve(records, train_length))
    canvas.draw()  # type: ignore[no-untyped-call]  # matplotlib declares no types here
    pixels = np.array(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return pixels[:, :, :3]


def length_curve(records: Sequence[Record], train_length: int) -> Figure:
    """Return a figure of perplexity by window length, a curve for each protocol.

    Args:
        records: One evaluation; a perplexity that is not finite leaves a gap.
        train_length: Training length L in tokens, which is marked.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(7, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    by_protocol: dict[str, dict[int, float]] = {}
    for record in records:
        value = record["perplexity"]
        drawn = value if isinstance(value, float) and math.isfinite(value) else math.nan
        by_protocol.setdefault(record["protocol"], {})[record["length"]] = drawn
    for protocol, points in by_protocol.items():
        lengths = sorted(points)
        axes.plot(lengths, [points[n] for n in lengths], marker="o", linewidth=2, label=protocol)
    axes.set_xscale("log", base=2)
    ticks = sorted({record["length"] for record in records})
    axes.set_xticks(ticks, [f"{n}\n{n / train_length:.3g} L" for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(train_length, color="#888888", linewidth=1.2, linestyle=":")
    axes.set_title(f"after step {records[0]['step']}")
    axes.set_xlabel("Evaluation length (tokens, and in training lengths L)")
    axes.set_ylabel("Perplexity")
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.legend(frameon=False)
    return figure
