"""Draws the lanes of a simulated step: docs/images/lanes-3b.png and lanes-3b-clipping.png of docs/architecture.md.

    python docs/draw_lanes.py [FOLDER]        # needs the extra `plots`

`simulate` runs the step plan with the durations of `qwen_3b`; nothing is measured on the spot. `draw` takes any
`Timeline`, so that other shapes and rates can be looked at from Python. Tested by tests/test_docs.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from slideformer_ray.schedule import COMPUTE, GPU_LANES, StepShape, build_step
from slideformer_ray.simulator import Durations, Timeline, simulate

# By rows of 1024 tokens, one decoder layer of Qwen2.5-3B on an H200 with PyTorch 2.11, written out (measurements.md):
# seconds of forward, of recompute + backward; and the rate of the three together.
_LAYER_SECONDS = {32: (8.79e-3, 23.83e-3), 8: (2.28e-3, 6.11e-3)}
_FLOPS = {32: 638e12, 8: 621e12}
# In the same machine: pinned copies, each way; the split-master AdamW on 16 cores; one thread reading host memory.
_PCIE_BYTES_PER_SECOND = 55e9
_UPDATE_NS_PER_PARAMETER = 0.195
_GATHER_BYTES_PER_SECOND = 8.5e9

_HIDDEN, _INNER, _LAYERS, _VOCAB, _KEY_VALUE = 2048, 11008, 36, 151_936, 256
_MATRICES = 2 * _HIDDEN * (_HIDDEN + _KEY_VALUE) + 3 * _HIDDEN * _INNER
_LAYER_PARAMETERS = _MATRICES + (_HIDDEN + 2 * _KEY_VALUE) + 2 * _HIDDEN  # biases of q, k, v; two norms
_ACTORS = 2


def qwen_3b(rows: int, clip: bool) -> tuple[StepShape, Durations]:
    """A step of `rows` x 1024 tokens in one micro-batch: a gradient slot a layer, all activations on the GPU."""
    tokens = rows * 1024
    forward, backward = _LAYER_SECONDS[rows]
    shape = StepShape(
        num_layers=_LAYERS,
        num_micro_batches=1,
        trainable=(True,) * (_LAYERS + 2),
        tied=True,
        gradient_slots=_LAYERS,
        num_optimizer_actors=_ACTORS,
        clip=clip,
    )
    durations = Durations.from_rates(
        tokens=tokens,
        hidden_size=_HIDDEN,
        layer_parameters=_LAYER_PARAMETERS,
        vocab_parameters=_VOCAB * _HIDDEN,
        tied=True,
        h2d_bytes_per_second=_PCIE_BYTES_PER_SECOND,
        d2h_bytes_per_second=_PCIE_BYTES_PER_SECOND,
        layer_forward_seconds=forward,
        layer_backward_seconds=backward,
        head_seconds=6 * _VOCAB * _HIDDEN * tokens / _FLOPS[rows],  # not measured: three products at the layers' rate
        update_ns_per_parameter=_UPDATE_NS_PER_PARAMETER * _ACTORS,  # an actor has its share of the cores
        num_optimizer_actors=_ACTORS,
        gather_bytes_per_second=_GATHER_BYTES_PER_SECOND,
        looked_up_fraction=1 - (1 - 1 / _VOCAB) ** tokens,  # distinct ones of ids drawn at random
    )
    return shape, durations


def steady_exposed(shape: StepShape, durations: Durations) -> dict[str, float]:
    """Seconds that the compute lane idles in a step that others precede, by cause: what a fourth step adds to three."""
    three, four = (simulate([build_step(shape)] * steps, durations).exposed_seconds for steps in (3, 4))
    return {cause: seconds - three[cause] for cause, seconds in four.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Drawing.

_LABELS_AND_COLOURS = {
    "forward": ("forward", "#4c86c6"),
    "head": ("loss and its gradient", "#7d5ba6"),
    "backward": ("recompute and backward", "#e08e45"),
    "upload_params": ("upload: a layer's parameters", "#5aa469"),
    "upload_head": ("upload: head", "#2f6b3f"),
    "gather_embedding": ("upload: embedding rows", "#9fd3a9"),
    "upload_activation": ("upload: activations", "#3aa6a0"),
    "download_gradient": ("download: gradient", "#8c6d46"),
    "download_activation": ("download: activations", "#cbb593"),
    "update_rows": ("update: rows that the next step looks up", "#8f0f4a"),
    "update": ("update: AdamW on a slice", "#c9587f"),
    **dict.fromkeys(
        ("finish_head", "finish_gradient", "embed_gradient", "finish_embed", "norm"),
        ("sums of gradients, norm", "#7f7f7f"),
    ),
}
_CAUSES = {
    "update": "waiting for updates",
    "step_edge": "first uploads of the step",
    "tail": "last gradients leaving",
    "upload_params": "parameter uploads",
    "upload_head": "head upload",
    "upload_activations": "activation uploads",
    "download": "downloads",
}
_EXPOSED = {"facecolor": "#fdecea", "edgecolor": "#d62728", "hatch": "////", "linewidth": 0.0}
_OTHER_STEP_ALPHA = 0.35
_MARGIN = 0.12  # of a step: how much of the next one is shown
_ROOM_FOR_EDGE, _ROOM_FOR_TEXT = 0.003, 0.035  # of the axis


def draw(axes: Axes, timeline: Timeline, step: int) -> None:
    """Lanes as rows, from the GPU's end of step `step` - 1 to a little after that of `step`. Other steps are pale."""
    begin, end = _gpu_end(timeline, step - 1), _gpu_end(timeline, step)
    until = end + _MARGIN * (end - begin)
    updates = sorted({run.lane for run in timeline.runs if run.lane.startswith("update.")})
    rows = {lane: row for row, lane in enumerate([*GPU_LANES, *updates])}
    for run in timeline.runs:
        if not run.seconds or run.end <= begin or run.start >= until:
            continue
        span = _bar(
            axes,
            rows[run.lane],
            run.start - begin,
            run.end - begin,
            facecolor=_LABELS_AND_COLOURS[run.op.kind][1],
            edgecolor="white",  # tells one layer from the next, where there is room for it
            linewidth=0.3 if run.seconds > _ROOM_FOR_EDGE * (until - begin) else 0.0,
            alpha=1.0 if run.step == step else _OTHER_STEP_ALPHA,
        )
        if run.op.block == 0 and run.seconds > _ROOM_FOR_TEXT * (until - begin):
            middle = (max(span[0], 0.0) + min(span[1], (until - begin) * 1e3)) / 2
            colour = "white" if run.step == step else "black"
            axes.text(middle, rows[run.lane], "embed", color=colour, ha="center", va="center", fontsize=7)
    for idle_from, idle_to in _idle(timeline):
        if idle_to > begin and idle_from < until:
            _bar(axes, rows[COMPUTE], idle_from - begin, idle_to - begin, **_EXPOSED)
    for edge in (0.0, end - begin):
        axes.axvline(edge * 1e3, color="black", linewidth=1.0, linestyle="--")
    axes.set_xlim(-0.004 * (until - begin) * 1e3, (until - begin) * 1e3)
    axes.set_ylim(len(rows) - 0.45, -0.6)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def describe(step_seconds: float, exposed: Mapping[str, float]) -> str:
    """Two lines: the step's time and what of it is exposed, then the causes in milliseconds, largest first."""
    by_size = sorted(exposed.items(), key=lambda item: -item[1])
    causes = [f"{_CAUSES[cause]} {seconds * 1e3:.0f}" for cause, seconds in by_size if seconds >= 0.5e-3]
    total = sum(exposed.values()) * 1e3
    return f"{step_seconds * 1e3:,.0f} ms a step, {total:,.0f} ms of it exposed\n({', '.join(causes)})"


def legend(timelines: Sequence[Timeline]) -> list[Patch]:
    drawn = {run.op.kind for timeline in timelines for run in timeline.runs if run.seconds}
    styles = dict(style for kind, style in _LABELS_AND_COLOURS.items() if kind in drawn)
    patches = [Patch(color=colour, label=label) for label, colour in styles.items()]
    return [*patches, Patch(label="exposed: the GPU computes nothing", **_EXPOSED | {"linewidth": 0.5})]


def _bar(axes: Axes, row: int, start: float, stop: float, **style: Any) -> tuple[float, float]:
    """Returns its begin and end, in the axis' milliseconds."""
    axes.broken_barh([(start * 1e3, (stop - start) * 1e3)], (row - 0.4, 0.8), **style)
    return start * 1e3, stop * 1e3


def _gpu_end(timeline: Timeline, step: int) -> float:
    return max(run.end for run in timeline.runs if run.lane in GPU_LANES and run.step == step)


def _idle(timeline: Timeline) -> Iterator[tuple[float, float]]:
    computing = [run for run in timeline.runs if run.lane == COMPUTE]
    for previous, run in pairwise(computing):
        if run.start > previous.end:
            yield previous.end, run.start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).resolve().parent / "images")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, clip in (("lanes-3b.png", False), ("lanes-3b-clipping.png", True)):
        figure, panels = pyplot.subplots(2, 1, figsize=(11, 7.8), layout="constrained")
        timelines = []
        for axes, rows in zip(panels, (32, 8), strict=True):
            shape, durations = qwen_3b(rows, clip)
            timelines.append(simulate([build_step(shape)] * 4, durations))
            draw(axes, timelines[-1], step=2)
            words = describe(timelines[-1].steady_step_seconds, steady_exposed(shape, durations))
            axes.set_title(f"{rows} x 1024 tokens: {words}", loc="left", fontsize=10)
            axes.set_xlabel("ms since the GPU ended the step before; dashed: begin and end of the step", fontsize=9)
        title = "Simulated steps of Qwen2.5-3B, " + ("with max_grad_norm" if clip else "without max_grad_norm")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.legend(handles=legend(timelines), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        figure.savefig(folder / name, dpi=130)
        print(folder / name)


if __name__ == "__main__":
    main()
