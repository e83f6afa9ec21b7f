"""Draws docs/architecture.svg, the way of a patch, a weight and a token: python scripts/draw_architecture.py [FILE]."""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 960, 560
LIGHT = {"ink": "#24292f", "soft": "#57606a", "fill": "#f6f8fa", "line": "#8c959f", "key": "#ddf4ff", "edge": "#0969da",
         "page": "#ffffff"}  # fmt: skip
DARK = {"ink": "#e6edf3", "soft": "#9198a1", "fill": "#161b22", "line": "#6e7681", "key": "#0c2d4a", "edge": "#4493f8",
        "page": "#0d1117"}  # fmt: skip
COLOURS = """
text {{ fill: {ink} }}
.small {{ fill: {soft} }}
.box {{ fill: {fill}; stroke: {line} }}
.key {{ fill: {key}; stroke: {edge} }}
.arrow {{ stroke: {soft}; fill: none }}
.tip {{ fill: {soft} }}
.page {{ fill: {page} }}
"""
FONTS = """
text { font: 14px system-ui, sans-serif }
.small { font-size: 12px }
.head { font-weight: 600; font-size: 15px }
"""
Box = tuple[int, int, int, str, tuple[str, ...], bool]  # x, y, width, name, lines below it, whether it is a key one

#: a row each: of the patch, of the weight, of the token
PARTS: tuple[Box, ...] = (
    (20, 50, 140, "recipe", ("YAML: rules", "recipe/"), False),
    (20, 140, 140, "model", ("in memory, or", "its configuration"), False),
    (210, 95, 150, "plan", ("sites x replacers,", "each with a reason"), True),
    (410, 95, 150, "build, verify", ("replacements beside", "their originals"), True),
    (610, 95, 150, "swap", ("all or nothing; then", "fused layers"), True),
    (810, 95, 130, "report", ("what happened,", "and why"), False),
    (20, 260, 140, "float weight", ("nn.Linear [N, K]", ""), False),
    (210, 260, 150, "quant/", ("rounding: codes,", "scales, offsets"), False),
    (410, 260, 150, "RowMajor", ("canonical rows: what", "a state dict holds"), True),
    (610, 260, 150, "device layout", ("packs on a CPU,", "tiles on a GPU"), False),
    (810, 260, 130, "operation", ("LINEARS: one", "for each layout"), True),
    (20, 420, 140, "generate()", ("of transformers;", "the same object"), False),
    (210, 420, 150, "runtime/", ("may a fast step run?", "else the modules"), True),
    (410, 375, 150, "captured step", ("GPU: a graph over", "fused layers"), False),
    (410, 465, 150, "native step", ("CPU: all layers in", "one C++ call"), False),
    (610, 420, 150, "dispatch", ("first implementation", "without a reason"), True),
    (810, 420, 130, "kernel", ("hip, ck, triton,", "cpu, torch"), False),
)
ROW = 64
HEADS = ((20, 30, "A patch"), (20, 245, "A weight"), (20, 360, "A token"))
ARROWS = (
    "M160 82 H185 V118 H206", "M160 172 H185 V136 H206", "M360 127 H406", "M560 127 H606", "M760 127 H806",
    "M160 292 H206", "M360 292 H406", "M560 292 H606", "M760 292 H806",
    "M160 452 H206", "M360 443 H385 V407 H406", "M360 461 H385 V497 H406", "M560 407 H585 V443 H606",
    "M560 497 H585 V461 H606", "M760 452 H806", "M485 159 V222 H130 V256", "M875 324 V366 H685 V416",
)  # fmt: skip
NOTES = (
    (495, 210, "each replacement is built from its original's weight"),
    (697, 386, "choice.py: the order, measured"),
    (20, 545, "unpatch() puts the original modules back, bit for bit"),
)


def text(x: int, y: int, words: str, kind: str = "") -> str:
    """A line of text that begins at x."""
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def box(x: int, y: int, width: int, name: str, lines: tuple[str, ...], key: bool) -> list[str]:
    """A room or a stage, with what it holds."""
    mark = "key" if key else "box"
    drawn = [
        f'<rect class="{mark}" x="{x}" y="{y}" width="{width}" height="{ROW}" rx="8"/>',
        text(x + 10, y + 20, name, "head"),
    ]
    return drawn + [text(x + 10, y + 38 + 16 * row, line, "small") for row, line in enumerate(lines) if line]


def drawing() -> str:
    """The whole picture, in the colours that its reader prefers."""
    dark = f"@media (prefers-color-scheme: dark) {{{COLOURS.format(**DARK)}}}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="How a patch, a weight and a token go through accelpatch">',
        f"<style>{FONTS}{COLOURS.format(**LIGHT)}{dark}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        *(text(x, y, words, "head") for x, y, words in HEADS),
        *(line for one in PARTS for line in box(*one)),
        *(f'<path class="arrow" d="{arrow}" marker-end="url(#tip)"/>' for arrow in ARROWS),
        *(text(x, y, words, "small") for x, y, words in NOTES),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Draw the picture of docs/architecture.md.")
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=PICTURE,
        help="The file to write; docs/architecture.svg where none is given.",
    )
    parser.parse_args().file.write_text(drawing())


if __name__ == "__main__":
    main()
