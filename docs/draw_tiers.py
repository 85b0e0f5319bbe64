"""Draws the three tiers, what lies in each and what moves between them: docs/images/tiers.png of docs/architecture.md.

    python docs/draw_tiers.py [FOLDER]        # needs the extra `plots`

Tested by tests/test_docs.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

_GPU, _SHARED, _PRIVATE, _DISK, _INK = "#e6eef7", "#e7f3e9", "#f9e9ef", "#f3ede3", "#333333"


def panel(axes: Axes, x: float, y: float, width: float, height: float, title: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.12", fc=colour, ec=_INK, lw=1.0)
    )
    axes.text(x + width / 2, y + height - 0.1, title, ha="center", va="top", fontsize=10.5, fontweight="bold")


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.0,rounding_size=0.06", fc="white", ec=_INK, lw=0.7)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str, colour: str = _INK) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, lw=1.6, color=colour))
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    axes.text(middle[0], middle[1] + 0.07, text, ha="center", va="bottom", fontsize=9, color=colour, linespacing=1.3)


def draw(axes: Axes) -> None:
    axes.set(xlim=(0, 14), ylim=(0, 7.0), aspect="equal")
    axes.axis("off")

    panel(axes, 0.1, 1.5, 3.4, 4.1, "GPU actor: sliding window", _GPU)
    box(axes, 0.3, 4.25, 3.0, 0.75, "parameter units,\na decoder layer each")
    box(axes, 0.3, 3.35, 3.0, 0.75, "gradient units;\nfp32 sum of one layer")
    box(axes, 0.3, 2.45, 3.0, 0.75, "activation slots")
    box(axes, 0.3, 1.6, 3.0, 0.7, "vocabulary unit\nand its fp32 sum")

    panel(axes, 5.1, 1.5, 3.8, 4.1, "Shared memory: plasma, pinned", _SHARED)
    box(axes, 5.3, 4.25, 3.4, 0.75, "hi: bf16 parameters,\none buffer a block")
    box(axes, 5.3, 3.35, 3.4, 0.75, "gradient slots;\ngradients of embedding and head")
    box(axes, 5.3, 2.45, 3.4, 0.75, "activation cells:\nthose that the GPU cannot keep")
    box(axes, 5.3, 1.6, 3.4, 0.7, "control page: version counters;\nbatches: ids and targets")

    panel(axes, 10.5, 1.5, 3.4, 4.1, "Optimizer actors: slice k", _PRIVATE)
    box(axes, 10.7, 4.25, 3.0, 0.75, "lo: 16-bit rest of each\nfp32 master (private)")
    box(axes, 10.7, 3.35, 3.0, 0.75, "AdamW in C, one pass\nover a layer's slice")
    box(axes, 10.7, 1.6, 3.0, 1.6, "exp_avg, exp_avg_sq,\nfp32 (private)")

    arrow(axes, (5.15, 4.63), (3.4, 4.63), "upload", "#2f6b3f")
    arrow(axes, (3.4, 3.73), (5.15, 3.73), "download", "#8c6d46")
    arrow(axes, (3.4, 2.95), (5.15, 2.95), "layers' inputs", "#3a7f9a")
    arrow(axes, (5.15, 2.68), (3.4, 2.68), "", "#3a7f9a")
    axes.text(4.28, 2.6, "and back", ha="center", va="top", fontsize=9, color="#3a7f9a")
    arrow(axes, (10.55, 4.63), (8.8, 4.63), "new hi", "#a83b62")
    arrow(axes, (8.8, 3.73), (10.55, 3.73), "gradient", "#8c6d46")

    panel(axes, 5.1, 6.3, 3.8, 0.45, "Driver: one call an actor a step", "white")
    for end in ((1.8, 5.68), (7.0, 5.68), (12.2, 5.68)):
        axes.add_patch(
            FancyArrowPatch((7.0, 6.27), end, arrowstyle="-|>", mutation_scale=11, lw=1.0, ls="--", color="#777777")
        )

    panel(axes, 5.1, 0.3, 3.8, 0.45, "Disk: model/ and state/", _DISK)
    arrow(axes, (7.0, 1.45), (7.0, 0.82), "")
    axes.text(7.12, 1.14, "hi, by the storage actor, at a save", fontsize=9, va="center")
    arrow(axes, (12.2, 1.45), (9.0, 0.55), "")
    axes.text(10.9, 0.72, "lo and moments, at a save", fontsize=9, va="center")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).resolve().parent / "images")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(11, 5.6), layout="constrained")
    draw(axes)
    figure.savefig(folder / "tiers.png", dpi=130)
    print(folder / "tiers.png")


if __name__ == "__main__":
    main()
