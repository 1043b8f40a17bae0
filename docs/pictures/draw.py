"""Draws the pictures of the pages, as SVG, from the data below: `python docs/pictures/draw.py`.

A picture brings its own background, light or dark as the reader's system is, so that it can be read
on any page. Types differ by letter and by pattern, and not by colour alone.
"""

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
CELL = 30

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 15px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 13px } .note { font-size: 13px; fill: #59636e }
  .bold { font-weight: 600 } .code { font-family: ui-monospace, monospace; font-size: 13px }
  .mid { text-anchor: middle } .end { text-anchor: end }
  .line { stroke: #59636e; stroke-width: 1.5; fill: none } .head { fill: #59636e }
  .rule { stroke: #d0d7de }
  .I { fill: #cfe3fb; stroke: #1f5fa8 } .R { fill: #d3f0dc; stroke: #1a7f4b }
  .S { fill: #fde5c4; stroke: #a85b00 } .S1 { fill: #f3c58a; stroke: #a85b00 }
  .P { fill: #ead9f7; stroke: #7a3fb0 }
  .V { fill: #e6e8eb; stroke: #59636e } .none { fill: none; stroke: #8c959f }
  .hatch { stroke: #7a3fb0; stroke-opacity: 0.35 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 } .note { fill: #9da7b3 }
    .line { stroke: #9da7b3 } .head { fill: #9da7b3 } .rule { stroke: #30363d }
    .I { fill: #173a63; stroke: #79b8ff } .R { fill: #12432a; stroke: #56d394 }
    .S { fill: #553305; stroke: #f0b35a } .S1 { fill: #7a4c0c; stroke: #f0b35a }
    .P { fill: #3f2560; stroke: #c79bf2 }
    .V { fill: #2d333b; stroke: #9da7b3 } .none { stroke: #6e7681 }
    .hatch { stroke: #c79bf2 }
  }
"""
DEFS = """<defs>
  <pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse">
    <path d="M0 7L7 0" class="hatch"/></pattern>
  <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
    orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="head"/></marker>
</defs>"""


def svg(name: str, width: int, height: int, title: str, parts: Iterable[str]) -> None:
    """Writes a picture; `title` says what it shows to those who do not see it."""
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n{DEFS}\n"
        f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>\n'
    )
    (FOLDER / f"{name}.svg").write_text(text + "\n".join(parts) + "\n</svg>\n")


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Writes words with their baseline at y."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draws a rectangle filled for a type; that of a pending sum is hatched."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    hatch = f'<rect {place} fill="url(#hatch)"/>' if kind == "P" else ""
    return f'<rect {place} class="{kind}"/>{hatch}'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Draws a straight arrow."""
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="line" marker-end="url(#head)"/>'


def cells(x: float, y: float, values: str, kind: str) -> str:
    """Draws numbers in a row of cells; "." is a cell of another rank."""
    found = []
    for i, value in enumerate(values.split()):
        at = x + i * CELL
        if value == ".":
            continue
        found.append(box(at, y, CELL, CELL, kind))
        found.append(text(at + CELL / 2, y + 20, value, "mid"))
    return "".join(found)


TYPES = [
    # letter, name, what ranks 0 and 1 hold, what that means; the gradient's type and meaning
    (
        *("I", "I  invariant", "3 1 4 1", "3 1 4 1", "equal: one computation, repeated"),
        *("I", "equal, complete"),
    ),
    (
        *("R", "R  replicate", "3 1 4 1", "3 1 4 1", "equal: each rank uses it in its own way"),
        *("P", "an addend on each rank"),
    ),
    (
        *("S", "S(0)  shard", "3 1 . .", ". . 4 1", "parts: joined along dim 0 they are the value"),
        *("S", "sharded in the same way"),
    ),
    (
        *("P", "Partial", "1 0 4 2", "2 1 0 -1", "addends: the true value is their sum"),
        *("R", "equal on all ranks"),
    ),
    (
        *("V", "V  varying", "3 1 4 1", "5 9 2 6", "each rank its own, related in no way"),
        *("V", "each rank its own"),
    ),
]
NAMES = {"P": "Partial", "S": "S(0)"}


def types() -> None:
    """One global value, [3 1 4 1], as each type holds it on two ranks."""
    width, step = 800, 52
    parts = [
        text(24, 34, "type", "note"),
        *(text(168 + 150 * rank, 34, f"rank {rank} holds", "note") for rank in (0, 1)),
        text(470, 34, "what that means", "note"),
    ]
    for i, (kind, name, first, second, meaning, back, back_meaning) in enumerate(TYPES):
        y = 50 + i * step
        parts += [
            text(24, y + 20, name, "bold"),
            cells(168, y, first, kind),
            cells(318, y, second, kind),
            text(470, y + 13, meaning, "small"),
            text(470, y + 31, f"gradient: {NAMES.get(back, back)}, {back_meaning}", "note"),
        ]
    height = 50 + len(TYPES) * step + 8
    svg("types", width, height, "What two ranks hold of the value 3 1 4 1, for each type", parts)


def matrix(x: float, y: float, rows: int, cols: int, cut: int | None, kind: str) -> str:
    """Draws a matrix; `cut` is the dim of which rank 0 has the first half, rank 1 the other."""
    w, h = cols * 17, rows * 17
    if cut is None:
        return box(x, y, w, h, kind)
    halves = [(x, y), (x + w / 2, y) if cut else (x, y + h / 2)]
    size = (w / 2, h) if cut else (w, h / 2)
    found = []
    for rank, (at_x, at_y) in enumerate(halves):
        found.append(box(at_x, at_y, *size, "S1" if rank else "S"))
        found.append(text(at_x + size[0] / 2, at_y + size[1] / 2 + 5, str(rank), "mid small"))
    return "".join(found)


MATMULS = [
    # what is done, dims that are cut of x, w and y, types of x, w and y
    ("the rows of x are shared (data parallel)", (0, None, 0), ("S(0)", "R", "S(0)")),
    ("the columns of w are shared (column parallel)", (None, 1, 1), ("R", "S(1)", "S(1)")),
    ("columns of x, rows of w (row parallel)", (1, 0, None), ("S(1)", "S(0)", "Partial")),
]


def matmul() -> None:
    """Three ways in which two ranks share y = x @ w."""
    parts = []
    for i, (words, cuts, letters) in enumerate(MATMULS):
        top = 20 + i * 142
        parts.append(text(24, top + 18, words, "bold"))
        sizes = [(4, 6), (6, 5), (4, 5)]
        x = 40.0
        for j, ((rows, cols), cut, letter) in enumerate(zip(sizes, cuts, letters, strict=True)):
            y = top + 28 + (6 - rows) * 17 / 2
            parts.append(matrix(x, y, rows, cols, cut, letter[0]))
            middle = x + cols * 17 / 2
            if letter == "Partial":
                parts.append(text(middle, y + 39, "0 + 1", "mid small"))
            parts.append(
                text(x + cols * 17 + 8, y + rows * 17 - 2, f"{'xwy'[j]}: {letter}", "small")
            )
            x += cols * 17 + 78
            if j < 2:
                parts.append(text(x - 26, top + 84, "@=?"[j], "mid bold"))
        if i < 2:
            parts.append(f'<path d="M24 {top + 140}H560" class="rule"/>')
    title = "Three ways to share a matrix product between rank 0 and rank 1"
    svg("matmul", 584, 452, title, parts)


LAYERS = [
    ("column parallel, then row parallel", [
        ("x", "I"), ("convert", ""), ("x", "R"), ("@ w1", ""), ("h", "S"),
        ("@ w2", ""), ("y", "P"), ("all_reduce", ""), ("z", "I"),
    ], [
        ("dx", "I"), ("all_reduce", ""), ("dx", "P"), ("@ w1ᵀ", ""), ("dh", "S"),
        ("@ w2ᵀ", ""), ("dy", "R"), ("convert", ""), ("dz", "I"),
    ]),
]  # fmt: skip


def backward() -> None:
    """A layer of two matmuls forward, and below it what autograd derives."""
    _, forward, back = LAYERS[0]
    parts = [
        text(24, 34, "forward", "bold"),
        text(24, 154, "backward", "bold"),
    ]
    for row, y in ((forward, 50), (back, 170)):
        x = 24.0
        for name, kind in row:
            if kind:
                letter = {"P": "Partial", "S": "S(1)"}.get(kind, kind)
                parts += [
                    box(x, y, 62, 46, kind),
                    text(x + 31, y + 19, name, "mid bold"),
                    text(x + 31, y + 37, letter, "mid small"),
                ]
                x += 62
                continue
            ends = (x + 4, x + 88) if row is forward else (x + 88, x + 4)
            parts += [
                arrow(ends[0], y + 23, ends[1], y + 23),
                text(x + 46, y + 15, name, "mid code"),
            ]
            x += 92
    sends = "sends"
    parts += [
        text(24 + 62 * 4 + 92 * 3 + 46, 112, sends, "mid note"),
        text(24 + 62 + 46, 232, sends, "mid note"),
    ]
    title = "Types forward and backward of a column-parallel and a row-parallel product"
    svg("backward", 726, 252, title, parts)


MOVES = [
    # from, to, name, where the label stands
    ("P", "I", "all_reduce(dst=I)", (400, 54)),
    ("P", "R", "all_reduce(dst=R)", (250, 130)),
    ("P", "S", "reduce_scatter", (150, 206)),
    ("S", "R", "all_gather(dst=R)", (400, 322)),
    ("S", "I", "all_gather(dst=I)", (470, 130)),
    ("I", "R", "convert", (658, 190)),
]
NODES = {"P": (110, 50), "I": (610, 50), "S": (110, 318), "R": (610, 318)}


def moves() -> None:
    """The types as places, and the collectives that lead from one to another."""
    parts = []
    size = (130, 48)
    for source, target, _, _ in MOVES:
        (x, y), (to_x, to_y) = NODES[source], NODES[target]
        dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        pad_x, pad_y = size[0] / 2 + 6, size[1] / 2 + 6
        if dx and dy:
            pad_x, pad_y = size[0] / 2 - 10, size[1] / 2 + 6
        parts.append(arrow(x + dx * pad_x, y + dy * pad_y, to_x - dx * pad_x, to_y - dy * pad_y))
    for _, _, name, (x, y) in MOVES:
        width = 8 * len(name) + 12
        place = f'x="{x - width / 2:g}" y="{y - 15}" width="{width}" height="22"'
        parts.append(f'<rect {place} class="card" stroke-opacity="0"/>')
        parts.append(text(x, y, name, "mid code"))
    for kind, (x, y) in NODES.items():
        name = {"P": "Partial", "S": "S(dim)"}.get(kind, kind)
        words = {"P": "addends", "S": "parts", "I": "equal, repeated", "R": "equal, used apart"}[
            kind
        ]
        parts += [
            box(x - size[0] / 2, y - size[1] / 2, *size, kind),
            text(x, y - 4, name, "mid bold"),
            text(x, y + 15, words, "mid note"),
        ]
    svg("moves", 780, 366, "The collectives that lead from one type to another", parts)


STEP = re.compile(r"^\| (\d+) \| ([^|]+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)", re.MULTILINE)


def steps() -> None:
    """The times of a training step, as the tables of train_step.md have them."""
    page = (FOLDER.parent / "train_step.md").read_text()
    left, unit, y = 250, 190, 36.0
    parts, width = [], ""
    for new, name, median, low, high in STEP.findall(page.partition("\n## The step on")[0]):
        if new != width:
            parts.append(text(24, y + 8, f"width {new}", "bold"))
            y, width = y + 24, new
        end = left + unit * float(median)
        parts += [
            text(left - 12, y + 14, name, "end small"),
            box(left, y, end - left, 20, "I" if name.startswith("ours") else "V"),
            f'<path d="M{left + unit * float(low):g} {y + 10:g}H{left + unit * float(high):g}" '
            'class="line"/>',
            text(left + unit * float(high) + 10, y + 15, f"{median}x", "small"),
        ]
        y += 28 if name != "parallelize_module" else 44
    parts.append(f'<path d="M{left + unit} 24V{y - 12:g}" class="line" stroke-dasharray="4 4"/>')
    parts.append(
        text(24, y + 8, "medians, with the quartiles as lines; 1x is the step by hand", "note")
    )
    svg("steps", 780, int(y) + 24, "The time of a training step, beside one written by hand", parts)


if __name__ == "__main__":
    for draw in (types, matmul, backward, moves, steps):
        draw()
