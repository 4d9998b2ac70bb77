"""Draws the diagrams of the pages into docs/: python docs/site/diagrams.py."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.append(str(Path(__file__).resolve().parents[2]))  # started by path: the import below needs this folder

from training.planning.memory import zero_states

DOCS = Path(__file__).resolve().parents[1]
# After Okabe and Ito: told apart with any colour vision, on a light and on a dark page.
GROUND, INK, GREY, BLUE, ORANGE, GREEN = LIGHT = "#fbfbf8", "#222222", "#d9d9d6", "#a5d3f5", "#f2b134", "#46a883"
DARK = "#1b1e23", "#f2f0ea", "#434850", "#2a5f9e", "#8a5a00", "#0f5c46"
_DARK_RULES = "".join(
    f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
    for light, dark in zip(LIGHT, DARK, strict=True)
)

TERMINAL_INK = "#e6edf3"
WIDTH = 420  # pixels, so that a telephone shows the text at nearly its full size
LEFT, RIGHT = 20, WIDTH - 20


class Drawing:
    """An SVG in pixels; shapes are drawn in the order in which they come."""

    def __init__(self, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f"<style>@media (prefers-color-scheme:dark){{{_DARK_RULES}}}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{GROUND}"/>',
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
        # Text is placed by its baseline, which lies 5 pixels below the middle of a letter. Lines
        # are 18 apart, and half of them stand above the middle of the box.
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line, anchor="middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, both: bool = False) -> None:
        """A straight arrow."""
        start = ' marker-start="url(#tip)"' * both
        self.parts.append(
            f'<path d="M{x:g} {y:g} {to_x:g} {to_y:g}" stroke="{INK}" fill="none" marker-end="url(#tip)"{start}/>'
        )

    def legend(self, y: float, *entries: tuple[str, str], x: float = LEFT) -> None:
        """Colours with what they mean, in one line."""
        for fill, words in entries:
            self.box(x, y, 14, 14, fill)
            self.text(x + 20, y + 12, words)
            # About 7 pixels per letter: only a browser could measure the words.
            x += 40 + 7 * len(words)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def system() -> Drawing:
    """From texts to answers: the programs, and what passes between them."""
    drawing = Drawing(536, "Texts are trained on; the model folder is exported, put into an image and served to users")
    steps = (
        (GREY, ("texts and labels",), "torchrun training/train_ddp.py"),
        (BLUE, ("training/", "ranks under torchrun, saving checkpoints"), "at the end of the run"),
        (GREY, ("model folder", "config.json, tokenizer.json, model.safetensors"), "python -m inference.export"),
        (GREY, ("exported model", "native/ or onnx/, with manifest.json"), "make image"),
        (ORANGE, ("container image", "the server and the exported model"), "docker run"),
        (BLUE, ("inference/", "HTTP server: /predict, /demo, /metrics"), "HTTP"),
        (GREEN, ("people and programs",), ""),
    )
    y = 20
    for number, (fill, lines, then) in enumerate(steps):
        height = 34 if len(lines) == 1 else 50
        drawing.box(LEFT, y, WIDTH - 2 * LEFT, height, fill, *lines)
        y += height
        if number < len(steps) - 1:
            drawing.arrow(120, y, 120, y + 24)
            drawing.text(134, y + 17, then)
            y += 26
    drawing.text(LEFT, y + 26, "common/ is what both programs must agree on.")
    return drawing


def request() -> Drawing:
    """The way of one text through the server, and where it may be refused."""
    drawing = Drawing(
        668, "A request: connection, gate, route, classifier, then tokenizer, queue and forward pass; back"
    )
    left, right, wide = LEFT, 220, 180
    drawing.text(left, 34, "event loop", bold=True)
    drawing.text(right + 22, 34, "refused with", bold=True)
    drawing.text(right, 350, "threads", bold=True)
    accepted = (
        (("connections", "bounded; idle ones end"), ("503 if there are", "too many")),
        (("request gate", "reads the headers only"), ("401, 429, 413,", "503 if the queue is full")),
        (("route", "checks the whole body"), ("400, 408, 413,", "415, 422")),
        (("classifier", "accepts, if in time"), ("503 with Retry-After",)),
    )
    for number, (lines, refused) in enumerate(accepted):
        y = 50 + 78 * number
        drawing.box(left, y, wide, 52, BLUE, *lines)
        drawing.arrow(left + wide, y + 26, right + 14, y + 26)
        for line, words in enumerate(refused):
            drawing.text(right + 22, y + 31 + 18 * (line - (len(refused) - 1) / 2), words)
        if number < len(accepted) - 1:
            drawing.arrow(left + wide / 2, y + 52, left + wide / 2, y + 76)
    threads = (
        (ORANGE, ("tokenizer thread", "cleans, makes token ids")),
        (GREY, ("fair queue", "next pass by tokens")),
        (ORANGE, ("worker thread", "runs the engine")),
    )
    drawing.parts.append(  # from the classifier over to the tokenizer
        f'<path d="M{left + wide / 2:g} 336 V382 H{right - 2}" stroke="{INK}" fill="none" marker-end="url(#tip)"/>'
    )
    for number, (fill, lines) in enumerate(threads):
        y = 356 + 78 * number
        drawing.box(right, y, wide, 52, fill, *lines)
        if number < len(threads) - 1:
            drawing.arrow(right + wide / 2, y + 52, right + wide / 2, y + 76)
    drawing.arrow(right, 538, left + wide + 2, 538)
    drawing.box(left, 512, wide, 52, BLUE, "deliver", "one future per text")
    drawing.arrow(left + wide / 2, 564, left + wide / 2, 588)
    drawing.box(left, 590, wide, 52, BLUE, "answer", "label, probabilities")
    drawing.text(right + 2, 612, "504 if it came too late")
    drawing.text(right + 2, 634, "The gate logs and counts.")
    return drawing


def mlops() -> Drawing:
    """What repeats for as long as a model is in use, with the command of each station."""
    drawing = Drawing(494, "The loop: serve, observe, alarm, review, retrain, verdict, promote, and serve again")
    wide, high, step, left, right = 182, 76, 108, LEFT, RIGHT - 182
    drawing.text(LEFT, 32, "A name with a dot is a command: python -m NAME.")
    stations = (
        (left, 0, wide, BLUE, "serve", "answers over HTTP", "inference.serve"),
        (right, 0, wide, GREY, "observe", "counts, keeps texts", "OBSERVE, KEEP_TEXTS"),
        (right, 1, wide, ORANGE, "alarm", "the texts have changed", "GET /model"),
        (right, 2, wide, ORANGE, "review", "people label what helps", "loop.review serve"),
        (left, 3, RIGHT - LEFT, GREEN, "retrain", "old and reviewed rows, then the export", "loop.retrain"),
        (left, 2, wide, GREEN, "verdict", "old and new, row by row", "loop.verdict"),
        (left, 1, wide, BLUE, "promote", "or later: roll back", "loop.promote"),
    )
    for x, row, width, fill, name, what, command in stations:
        y = 46 + step * row
        drawing.box(x, y, width, high, fill)
        for line, words in enumerate((name, what, command)):
            drawing.text(x + width / 2, y + 25 + 19 * line, words, anchor="middle", bold=line == 0)
    drawing.arrow(left + wide, 46 + high / 2, right - 2, 46 + high / 2)
    for row in range(3):
        top, bottom = 46 + high + step * row, 46 + step * (row + 1)
        drawing.arrow(right + wide / 2, top, right + wide / 2, bottom - 2)
        drawing.arrow(left + wide / 2, bottom, left + wide / 2, top + 2)
    drawing.text(left, 474, "After HOLD or REJECT, the old model stays.")
    return drawing


def processes() -> Drawing:
    """Two machines with two ranks each, and what torchrun tells each of them."""
    drawing = Drawing(424, "Two machines, two processes on each: ranks, local ranks and the process group")
    for machine in range(2):
        top = 16 + 150 * machine
        drawing.box(LEFT, top, WIDTH - 2 * LEFT - 40, 136, GROUND)
        drawing.text(LEFT + 12, top + 22, f"machine {machine}: one torchrun", bold=True)
        for local in range(2):
            rank = 2 * machine + local
            x, fill = LEFT + 12 + 164 * local, (BLUE, ORANGE)[local]
            drawing.box(x, top + 34, 150, 88, fill, f"RANK {rank}", f"LOCAL_RANK {local}", f"GPU {local}")
        # The machines hang on a line at the right, which leads to the group.
        drawing.parts.append(f'<path d="M{RIGHT - 40} {top + 78} h24 V{338}" stroke="{INK}" fill="none"/>')
    drawing.arrow(RIGHT - 16, 320, RIGHT - 16, 340)
    drawing.box(
        LEFT, 342, WIDTH - 2 * LEFT, 64, GREEN, "process group: WORLD_SIZE 4", "found through MASTER_ADDR:MASTER_PORT"
    )
    return drawing


def gradients() -> Drawing:
    """One step by hand and one in DDP, over time."""
    drawing = Drawing(300, "A step by hand and a step in DDP: the all-reduces overlap with the backward pass")
    drawing.text(LEFT, 34, "By hand: one call per tensor, after backward", bold=True)
    drawing.box(20, 46, 66, 32, BLUE, "forward")
    drawing.box(86, 46, 134, 32, BLUE, "backward")
    for call in range(8):
        drawing.box(220 + 16 * call, 46, 16, 32, ORANGE)
    drawing.text(284, 98, "8 all-reduces", anchor="middle")
    drawing.box(348, 46, 44, 32, GREEN, "step")
    drawing.text(LEFT, 146, "DDP: a bucket's all-reduce starts as soon as", bold=True)
    drawing.text(LEFT, 164, "its last gradient is there", bold=True)
    drawing.box(20, 176, 66, 32, BLUE, "forward")
    drawing.box(86, 176, 134, 32, BLUE, "backward")
    for part in range(3):
        right = 86 + 134 * (part + 1) / 3
        drawing.arrow(right, 208, right, 226)
        drawing.box(right, 228, 42, 32, ORANGE, str(part))
    drawing.box(262, 176, 44, 32, GREEN, "step")
    drawing.text(270, 249, "buckets")
    drawing.text(LEFT, 286, "A drawing of the order; lengths are not measured.")
    return drawing


def fsdp_lanes() -> Drawing:
    """FSDP over time: what is communicated while a block is computed."""
    drawing = Drawing(382, "FSDP: the weights of the next block are gathered while a block is computed")
    # Each box is (start, length, colour, block), in units of a block's forward pass; its backward
    # pass takes two.
    unit = 47
    passes = {
        "Forward: the next block is gathered meanwhile": (
            [(0, 1, ORANGE, 0), (1, 1, ORANGE, 1), (2, 1, ORANGE, 2)],
            [(1, 1, BLUE, 0), (2, 1, BLUE, 1), (3, 1, BLUE, 2)],
        ),
        "Backward: gather again, scatter gradients": (
            [
                (0, 1, ORANGE, 2),
                (1, 1, ORANGE, 1),
                (3, 1, GREEN, 2),
                (4, 1, ORANGE, 0),
                (5, 1, GREEN, 1),
                (7, 1, GREEN, 0),
            ],
            [(1, 2, BLUE, 2), (3, 2, BLUE, 1), (5, 2, BLUE, 0)],
        ),
    }
    for panel, (title, lanes) in enumerate(passes.items()):
        top = 34 + 158 * panel
        drawing.text(LEFT, top, title, bold=True)
        for lane, (name, boxes) in enumerate(zip(("communication", "compute"), lanes, strict=True)):
            y = top + 32 + 54 * lane
            drawing.text(LEFT, y - 6, name)
            for start, length, fill, block in boxes:
                drawing.box(LEFT + unit * start, y, unit * length, 28, fill, str(block))
    drawing.legend(330, (ORANGE, "all-gather of block n"), (BLUE, "computes block n"))
    drawing.legend(354, (GREEN, "reduce-scatter of its gradients"))
    return drawing


def tensor_parallel() -> Drawing:
    """Two layers over two ranks: split by columns, then by rows, then one sum."""
    drawing = Drawing(500, "Tensor parallelism: a column split needs no communication, the row split after it one sum")
    left, right, wide = LEFT, 220, 180
    drawing.text(left + wide / 2, 30, "rank 0", anchor="middle", bold=True)
    drawing.text(right + wide / 2, 30, "rank 1", anchor="middle", bold=True)
    drawing.box(LEFT, 42, WIDTH - 2 * LEFT, 36, GREY, "input x, the same on both ranks")
    layers = (
        ("first matrix, split by columns", ("left columns", "right columns")),
        ("each value needs only itself", ("GELU", "GELU")),
        ("second matrix, split by rows", ("upper rows", "lower rows")),
    )
    for number, (note, names) in enumerate(layers):
        y = 118 + 82 * number
        for x, name, fill in zip((left, right), names, (BLUE, ORANGE), strict=True):
            drawing.arrow(x + wide / 2, y - 40, x + wide / 2, y - 2)
            drawing.box(x, y, wide, 38, fill, name)
        # The words lie on the arrows and get a ground of their own, or the lines would run through
        # them.
        drawing.parts.append(f'<rect x="100" y="{y - 32}" width="220" height="20" fill="{GROUND}"/>')
        drawing.text(WIDTH / 2, y - 17, note, anchor="middle")
    for x in (left, right):
        drawing.arrow(x + wide / 2, 320, x + wide / 2, 358)
    drawing.parts.append(f'<rect x="100" y="328" width="220" height="20" fill="{GROUND}"/>')
    drawing.text(WIDTH / 2, 343, "each rank has a partial sum", anchor="middle")
    drawing.box(LEFT, 360, WIDTH - 2 * LEFT, 38, GREEN, "all-reduce: adds the partial sums, then the bias")
    drawing.arrow(WIDTH / 2, 398, WIDTH / 2, 416)
    drawing.box(LEFT, 418, WIDTH - 2 * LEFT, 36, GREY, "output y, the same on both ranks")
    drawing.text(LEFT, 480, "Backward, the all-reduce adds the gradients of x.")
    return drawing


def mesh() -> Drawing:
    """Eight ranks as pp x dp x tp, and who communicates with whom."""
    drawing = Drawing(434, "Eight ranks on a mesh of two pipeline stages, two data ranks and two tensor ranks")
    for stage in range(2):
        x = 20 + 210 * stage
        drawing.box(x, 16, 170, 236, GROUND)
        drawing.text(x + 85, 38, f"stage {stage}", anchor="middle", bold=True)
        for data in range(2):
            y = 78 + 100 * data
            drawing.text(x + 85, y - 8, ("rows 0-15", "rows 16-31")[data], anchor="middle")
            for tensor in range(2):
                fill = (BLUE, ORANGE)[tensor]
                # Tensor ranks are neighbours in number, then data ranks, then stages, as the mesh
                # numbers them.
                drawing.box(x + 10 + 88 * tensor, y, 62, 44, fill, f"rank {4 * stage + 2 * data + tensor}")
            drawing.arrow(x + 73, y + 22, x + 97, y + 22, both=True)
        for tensor in range(2):
            drawing.arrow(x + 22 + 126 * tensor, 124, x + 22 + 126 * tensor, 176, both=True)
    for data in range(2):
        drawing.arrow(191, 100 + 100 * data, 229, 100 + 100 * data, both=True)
    notes = (
        ("tp, left and right:", "all-reduces inside every block"),
        ("dp, up and down:", "gradients once per step; each has its own rows"),
        ("pp, between the stages:", "activations forward, their gradients backward"),
    )
    for number, (name, what) in enumerate(notes):
        drawing.text(LEFT, 280 + 44 * number, name, bold=True)
        drawing.text(LEFT, 298 + 44 * number, what)
    drawing.legend(404, (BLUE, "first half of each matrix"), (ORANGE, "second half"))
    return drawing


def zero_memory() -> Drawing:
    """Bytes per parameter on one of eight ranks under each ZeRO stage."""
    drawing = Drawing(318, "Bytes per parameter on each of eight ranks under ZeRO stages 0 to 3")
    drawing.text(LEFT, 34, "Bytes per parameter on each of 8 ranks", bold=True)
    names = ("stage 0: ddp", "stage 1: zero1", "stage 2: zero2", "stage 3: zero3")
    for stage, name in enumerate(names):
        y, x = 70 + 54 * stage, float(LEFT)
        # Computed by the planner's own function, so that drawing and plan cannot disagree.
        states = zero_states(1, 8, stage)
        drawing.text(LEFT, y - 6, f"{name}, {sum(states):g} bytes")
        for size, fill in zip(states, (BLUE, ORANGE, GREEN), strict=True):
            drawing.box(x, y, 23 * size, 24, fill, *([f"{size:g}"] * (size > 1)))
            x += 23 * size
    drawing.legend(284, (BLUE, "weights"), (ORANGE, "gradients"), (GREEN, "optimizer state"))
    return drawing


def step_memory() -> Drawing:
    """Memory over one training step of four blocks."""
    drawing = Drawing(366, "Memory over a step: activations rise in the forward pass and fall in the backward pass")
    blocks, slot, floor = 4, 42, 268
    # In proportion: AdamW's two moments are twice as high as the weights, and the gradients of four
    # blocks as high as the weights. Only the activations are drawn freely.
    optimizer, weights, gradient, activation = 56, 28, 7, 27
    # (activations, gradients) of how many blocks are held in each slot; a block goes backward with
    # both.
    held = [(block + 1, 0) for block in range(blocks)]
    held += [(blocks - block, block + 1) for block in range(blocks)]
    held += [(0, blocks)]
    for number, (num_activations, num_gradients) in enumerate(held):
        x, y = LEFT + slot * number, float(floor)
        for fill, height in (
            (GREEN, optimizer),
            (BLUE, weights),
            (ORANGE, gradient * num_gradients),
            (GREY, activation * num_activations),
        ):
            y -= height
            if height:
                drawing.parts.append(f'<rect x="{x}" y="{y:g}" width="{slot}" height="{height}" fill="{fill}"/>')
    drawing.arrow(LEFT, floor, LEFT + slot * len(held) + 4, floor)
    highest = floor - optimizer - weights - gradient - activation * blocks
    drawing.text(LEFT + slot * (blocks + 0.5), highest - 26, "the peak:", anchor="middle")
    drawing.text(LEFT + slot * (blocks + 0.5), highest - 8, "backward begins", anchor="middle")
    for words, start, slots in (("forward", 0, 4), ("backward", 4, 4), ("step", 8, 1)):
        drawing.text(LEFT + slot * (start + slots / 2), floor + 20, words, anchor="middle")
        if start:
            x = LEFT + slot * start
            drawing.parts.append(f'<path d="M{x} {floor + 6}V{highest + 4}" stroke="{INK}" stroke-dasharray="3 4"/>')
    drawing.legend(304, (GREY, "activations"), (ORANGE, "gradients"), (BLUE, "weights"))
    drawing.legend(328, (GREEN, "optimizer state"))
    drawing.text(170, 340, "Heights are not measured.")
    return drawing


def cuts() -> Drawing:
    """How four strategies lay a model of four layers over two ranks."""
    drawing = Drawing(560, "Four layers over two ranks, under ddp, zero3, tp and pp")
    captions = {
        "ddp": ("all layers on each rank,", "half of the rows each"),
        "zero3": ("half of each layer, but the", "whole one in its turn"),
        "tp": ("half of each matrix,", "+ sums the results"),
        "pp": ("half of the layers,", "micro-batches in turn"),
    }
    for panel, (strategy, caption) in enumerate(captions.items()):
        left, top = LEFT + 200 * (panel % 2), 16 + 260 * (panel // 2)
        drawing.text(left, top + 14, strategy, bold=True)
        if strategy in ("ddp", "zero3"):
            drawing.box(left, top + 24, 85, 26, GREY, "rows 0-7")
            drawing.box(left + 95, top + 24, 85, 26, GREY, "rows 8-15")
        else:
            drawing.box(left, top + 24, 180, 26, GREY, "rows 0-15")
        for layer in range(4):
            y = top + 58 + 34 * layer
            if strategy == "pp":
                drawing.box(left, y, 180, 28, BLUE if layer < 2 else ORANGE, f"layer {layer}")
                continue
            _layer_of_ranks(drawing, strategy, layer, left, y)
            if strategy == "tp":
                drawing.text(left + 90, y + 19, "+", anchor="middle", bold=True)
        drawing.text(left, top + 214, caption[0])
        drawing.text(left, top + 232, caption[1])
    drawing.legend(530, (BLUE, "rank 0"), (ORANGE, "rank 1"))
    return drawing


def _layer_of_ranks(drawing: Drawing, strategy: str, layer: int, left: float, y: float) -> None:
    """A layer of which both ranks have something."""
    for rank, fill in enumerate((BLUE, ORANGE)):
        x = left + 95 * rank
        # Under zero3, layer 1 is shown in its turn: gathered, and whole on both ranks.
        if strategy == "ddp" or (strategy == "zero3" and layer == 1):
            drawing.box(x, y, 85, 28, fill, f"layer {layer}")
        elif strategy == "tp":
            drawing.box(x, y, 85, 28, fill, f"half of {layer}")
        else:  # rank 0 keeps the first half of a layer, rank 1 the second
            drawing.box(x, y, 85, 28, GROUND)
            drawing.box(x + 42.5 * rank, y, 42.5, 28, fill, f"½ {layer}")


def terminal(title: str, lines: list[tuple[str, str]]) -> str:
    """The window of a terminal with lines and their colours."""
    # Monospace letters are 0.6 as wide as they are high, or a little more.
    width, height = 32 + 8 * max(len(line) for line, _ in lines), 20 * len(lines) + 58
    dots = "".join(f'<circle cx="{18 + 18 * dot}" cy="18" r="5" fill="#484f58"/>' for dot in range(3))
    texts = "".join(
        f'<text x="16" y="{58 + 20 * number}" fill="{colour}" xml:space="preserve">{escape(line)}</text>'
        for number, (line, colour) in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">'
        f"<title>{escape(title)}</title>"
        # The frame keeps the window apart from a page that is as dark as it is.
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#0d1117" stroke="#484f58"/>'
        f"{dots}{texts}</svg>\n"
    )


def check() -> str:
    """A terminal with what the checker says in the guide, wrapped as a terminal would."""
    guide = (DOCS / "DISTRIBUTED_TRAINING_GUIDE.md").read_text()
    # Taken from the guide and not written a second time here. Unless it is there exactly once, this
    # fails, and the drawing is not written.
    (printed,) = re.findall(r"^```text\n(faulty_solution\.py: each .*?)^```$", guide, re.M | re.S)
    lines = [("$ python -m learn.check data_parallel my_solution.py", "#9cdcfe")]
    for line in printed.replace("faulty_solution", "my_solution").splitlines():
        colours = {"wrong": "#ff7b72", "right": "#7ee787", "       hint": "#79c0ff"}
        colour = next((colour for start, colour in colours.items() if line.startswith(start)), TERMINAL_INK)
        lines += [(part, colour) for part in textwrap.wrap(line, 70, subsequent_indent=" " * 7) or [""]]
    return terminal("The checker says that a solution forgot the buffers and forgot to divide", lines)


DIAGRAMS = {
    "check.svg": check,
    "system.svg": system,
    "request.svg": request,
    "mlops.svg": mlops,
    "processes.svg": processes,
    "gradients.svg": gradients,
    "cuts.svg": cuts,
    "zero_memory.svg": zero_memory,
    "fsdp_lanes.svg": fsdp_lanes,
    "step_memory.svg": step_memory,
    "tensor_parallel.svg": tensor_parallel,
    "mesh.svg": mesh,
}


if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (DOCS / name).write_text(str(draw()))
