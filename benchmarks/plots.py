"""How the pictures of this folder look: one style, one colour a meaning. matplotlib is imported when one is drawn.

What always holds: a picture is written without a display, and holds no date, so that the same figures give the same
file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).with_name("plots")
BLUE, ORANGE, GREY = "#1f5fa8", "#d9680f", "#8a8a8a"
"""Told apart by people who do not see red and green, and in print by their lightness."""
INK, FRAME, GRID = "#222222", "#b8b8b8", "#e6e6e6"
DPI = 130


def grid(
    rows: int, columns: int, *, width: float, height: float, share_x: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """Axes by row and column; `width` and `height` of one, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
    for axis in axes.flat:
        _plain(axis)
    return figure, [list(row) for row in axes]


def _plain(axis: Axes) -> None:
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FRAME)
    axis.tick_params(colors=INK, labelsize=9, color=FRAME)


def save(figure: Figure, name: str, folder: Path = FOLDER) -> Path:
    """Write `name`.png."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path
