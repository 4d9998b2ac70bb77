"""The figure of ``benchmarks.scaling``: throughput over processes, and what a rank holds."""

from __future__ import annotations

import io
from collections.abc import Mapping

import matplotlib as mpl
from matplotlib.figure import Figure

# Okabe and Ito: distinct for colour-blind eyes too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
KINDS = {"parameters": "#0072b2", "gradients": "#e69f00", "optimizer": "#009e73"}


def draw(
    rates: Mapping[str, Mapping[int, float]], memory: Mapping[str, Mapping[int, Mapping[str, int]]], cores: int
) -> bytes:
    """PNG of two panels.

    Args:
        rates: samples/s by strategy and number of processes.
        memory: bytes of a rank by strategy, number of processes and kind.
        cores: up to as many processes throughput is shown.
    """
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
        alone = rates["ddp"][1]
        counts = sorted({count for by_count in rates.values() for count in by_count if count <= cores})
        left.plot(counts, [alone * count for count in counts], color="#9aa5b1", linestyle="--", label="linear")
        for colour, (name, by_count) in zip(COLOURS, rates.items(), strict=False):
            shown = {1: alone} | {count: rate for count, rate in sorted(by_count.items()) if count <= cores}
            left.plot(list(shown), list(shown.values()), "o-", color=colour, label=name)
        left.set(xlabel="processes, a core each", ylabel="samples/s", xticks=counts, ylim=(0, None))
        left.legend(frameon=False, fontsize=8)
        bars = [(f"{name}\n{count}", held) for name, by_count in memory.items() for count, held in by_count.items()]
        bottom = [0.0] * len(bars)
        for kind, colour in KINDS.items():
            heights = [held[kind] / 1e6 for _, held in bars]
            right.bar([label for label, _ in bars], heights, bottom=bottom, color=colour, label=kind)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        right.set(ylabel="MB a rank", xlabel="strategy and processes")
        right.tick_params(axis="x", labelsize=7)
        right.legend(frameon=False, fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=160)
    return file.getvalue()
