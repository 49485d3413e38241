"""The tables as a picture: bars, the fastest on top; batchd's in a colour of their own.

Needs matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
from sides import LIMIT, SHARING, Side
from tables import Table, in_order

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS, THEIRS, NOBODYS = "#1f6f8b", "#b8b8b8", "#e3cf9d"
BAR_INCHES = 0.32
AROUND_INCHES = 1.0
WIDTH_INCHES = 9.5


def draw(tables: dict[str, tuple[Sequence[Side], Table]], titles: dict[str, str], file: Path) -> None:
    """Write a PNG with one panel for each table that has measurements."""
    panels = {name: (in_order(sides, table), table) for name, (sides, table) in tables.items()}
    panels = {name: panel for name, panel in panels.items() if panel[0]}
    heights = [BAR_INCHES * len(sides) + AROUND_INCHES for sides, _ in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(WIDTH_INCHES, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, (name, (sides, table)) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(axis, sides, table, is_shared=name == SHARING)
        axis.set_title(titles[name], loc="left", fontsize=11)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _draw_panel(axis: plt.Axes, sides: Sequence[Side], table: Table, *, is_shared: bool) -> None:
    labels = [_label(side, is_shared=is_shared) for side in sides]
    rates = [[one.rate for one in table[side.name].values()] for side in sides]
    middles = [median(values) for values in rates]
    reach = [
        [middle - min(values) for middle, values in zip(middles, rates, strict=True)],
        [max(values) - middle for middle, values in zip(middles, rates, strict=True)],
    ]
    colors = [OURS if side.is_ours else NOBODYS if side.name == LIMIT else THEIRS for side in sides]
    bars = axis.barh(labels, middles, xerr=reach, color=colors, error_kw={"lw": 1, "ecolor": "#444444"})
    axis.bar_label(bars, [f"{middle:,.0f}" for middle in middles], padding=6, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.12, y=0.02)
    axis.set_xlabel("images/s for each trainer" if is_shared else "images/s")
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _label(side: Side, *, is_shared: bool) -> str:
    label = side.label.replace("`", "")
    return f"{label}: {side.trainers} {'trainer' if side.trainers == 1 else 'trainers'}" if is_shared else label
