"""Draws the guide's diagrams into docs/: python docs/site/diagrams.py."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1]
# Okabe and Ito's colours, told apart by the colour-blind too, on a ground of their own for light and dark pages.
GROUND, INK, GREY, BLUE, ORANGE, GREEN = "#fbfbf8", "#222222", "#d9d9d6", "#8cc6ee", "#f2c14e", "#7fcfb4"


class Drawing:
    """An SVG of so many units; shapes are drawn in the order in which they come."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{GROUND}"/>',
        ]

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> None:
        """One line of words, whose baseline is at y."""
        weight = ' font-weight="600"' * bold
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str) -> None:
        """A rectangle with lines of words in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{INK}"/>'
        )
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line, anchor="middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, both: bool = False) -> None:
        """A straight arrow."""
        start = ' marker-start="url(#tip)"' * both
        self.parts.append(
            f'<path d="M{x:g} {y:g} {to_x:g} {to_y:g}" stroke="{INK}" fill="none" marker-end="url(#tip)"{start}/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def processes() -> Drawing:
    """Two machines with two ranks each, and what torchrun tells each of them."""
    drawing = Drawing(760, 270, "Two machines, two processes on each: ranks, local ranks and the process group")
    for machine in range(2):
        left = 20 + 370 * machine
        drawing.box(left, 20, 350, 150, GROUND)
        drawing.text(left + 12, 42, f"machine {machine}: one torchrun", bold=True)
        for local in range(2):
            rank = 2 * machine + local
            x = left + 15 + 165 * local
            drawing.box(x, 58, 155, 94, (BLUE, ORANGE)[local], f"RANK {rank}", f"LOCAL_RANK {local}", f"GPU {local}")
            drawing.arrow(x + 77, 200, x + 77, 154, both=True)
    drawing.box(20, 200, 720, 48, GREEN, "process group: WORLD_SIZE 4, found through MASTER_ADDR:MASTER_PORT")
    return drawing


def gradients() -> Drawing:
    """One step by hand and one in DDP, over time."""
    drawing = Drawing(760, 290, "A step by hand and a step in DDP: the all-reduces hidden behind the backward pass")
    drawing.text(20, 34, "By hand: one call a tensor, after the backward pass", bold=True)
    drawing.box(20, 46, 120, 32, BLUE, "forward")
    drawing.box(140, 46, 240, 32, BLUE, "backward")
    for call in range(8):
        drawing.box(380 + 30 * call, 46, 30, 32, ORANGE)
    drawing.text(500, 98, "8 all-reduces", anchor="middle")
    drawing.box(620, 46, 60, 32, GREEN, "step")
    drawing.text(20, 148, "DDP: a bucket's all-reduce starts once its last gradient is there", bold=True)
    drawing.box(20, 160, 120, 32, BLUE, "forward")
    for part in range(3):
        drawing.box(140 + 80 * part, 160, 80, 32, BLUE, "backward"[: 8 if part == 1 else 0])
        drawing.arrow(220 + 80 * part, 192, 220 + 80 * part, 210)
        drawing.box(220 + 80 * part, 212, 70, 32, ORANGE, f"bucket {part}")
    drawing.box(452, 160, 60, 32, GREEN, "step")
    drawing.text(20, 274, "A drawing of the order of things; lengths are not measured.")
    return drawing


def cuts() -> Drawing:
    """How four strategies lay a model of four layers over two ranks."""
    drawing = Drawing(760, 270, "Four layers over two ranks, under ddp, zero3, tp and pp")
    captions = {
        "ddp": ("all layers on each rank,", "half of the rows each"),
        "zero3": ("half of each tensor,", "gathered in its turn"),
        "tp": ("half of each matrix,", "on the same rows"),
        "pp": ("half of the layers,", "micro-batches in turn"),
    }
    for panel, (strategy, caption) in enumerate(captions.items()):
        left = 20 + 185 * panel
        drawing.text(left, 34, strategy, bold=True)
        for layer in range(4):
            y = 50 + 34 * layer
            if strategy == "pp":
                drawing.box(left, y, 150, 28, BLUE if layer < 2 else ORANGE, f"layer {layer}")
            elif strategy == "ddp":
                drawing.box(left, y, 70, 28, BLUE, f"layer {layer}")
                drawing.box(left + 80, y, 70, 28, ORANGE, f"layer {layer}")
            else:
                drawing.box(left, y, 75, 28, BLUE, f"layer {layer}")
                drawing.box(left + 75, y, 75, 28, ORANGE, f"layer {layer}")
        drawing.text(left, 208, caption[0])
        drawing.text(left, 228, caption[1])
    drawing.box(20, 244, 14, 14, BLUE)
    drawing.text(40, 256, "rank 0")
    drawing.box(100, 244, 14, 14, ORANGE)
    drawing.text(120, 256, "rank 1")
    return drawing


DIAGRAMS = {"processes.svg": processes, "gradients.svg": gradients, "cuts.svg": cuts}


if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (DOCS / name).write_text(str(draw()))
