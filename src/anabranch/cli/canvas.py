"""Shapes on a page, written as SVG by ourselves or as PNG through Pillow where it is installed.

Owns nothing of what is drawn. Lengths are pixels from the top left; colours are #rrggbb.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

Anchor = Literal["start", "middle", "end"]
FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"
PNG_SCALE = 2


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    w: float
    h: float
    fill: str
    radius: float = 0.0
    stroke: str | None = None


@dataclass(frozen=True)
class Text:
    """y is the baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "#1f2937"
    bold: bool = False
    anchor: Anchor = "start"


@dataclass(frozen=True)
class Line:
    x0: float
    y0: float
    x1: float
    y1: float
    stroke: str
    width: float = 1.0


@dataclass
class Canvas:
    width: float
    height: float = 0.0
    shapes: list[Box | Text | Line] = field(default_factory=list)

    def add(self, *shapes: Box | Text | Line) -> None:
        self.shapes += shapes

    def save(self, path: Path) -> None:
        """By the file's ending. ValueError for another one, or for PNG without Pillow."""
        if path.suffix == ".svg":
            path.write_text(self.svg())
        elif path.suffix == ".png":
            self.png(path)
        else:
            raise ValueError(f"--draw {path}: pictures are written as .svg or .png")

    def svg(self) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}"'
        view = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        body = "\n".join(_svg(shape) for shape in self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="{FONT}">\n'
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
        )

    def png(self, path: Path) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise ValueError(
                f"--draw {path}: PNG needs Pillow (pip install 'anabranch[draw]'), .svg none"
            ) from None
        s = PNG_SCALE
        image = Image.new("RGB", (round(self.width * s), round(self.height * s)), "#ffffff")
        pen = ImageDraw.Draw(image)
        anchors = {"start": "ls", "middle": "ms", "end": "rs"}
        for shape in self.shapes:
            if isinstance(shape, Box):
                corners = (
                    shape.x * s, shape.y * s,
                    (shape.x + shape.w) * s - 1, (shape.y + shape.h) * s - 1,
                )  # fmt: skip
                pen.rounded_rectangle(corners, shape.radius * s, shape.fill, shape.stroke, s)
            elif isinstance(shape, Line):
                ends = (shape.x0 * s, shape.y0 * s, shape.x1 * s, shape.y1 * s)
                pen.line(ends, shape.stroke, max(1, round(shape.width * s)))
            else:
                weight = 0.4 * s if shape.bold else 0
                pen.text(
                    (shape.x * s, shape.y * s), shape.text, shape.fill,
                    ImageFont.load_default(shape.size * s), anchors[shape.anchor],
                    stroke_width=weight, stroke_fill=shape.fill,
                )  # fmt: skip
        image.save(path)


def _svg(shape: Box | Text | Line) -> str:
    if isinstance(shape, Box):
        stroke = f' stroke="{shape.stroke}"' if shape.stroke else ""
        radius = f' rx="{shape.radius:g}"' if shape.radius else ""
        place = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.w:g}" height="{shape.h:g}"'
        return f'<rect {place}{radius} fill="{shape.fill}"{stroke}/>'
    if isinstance(shape, Line):
        ends = f'x1="{shape.x0:g}" y1="{shape.y0:g}" x2="{shape.x1:g}" y2="{shape.y1:g}"'
        return f'<line {ends} stroke="{shape.stroke}" stroke-width="{shape.width:g}"/>'
    weight = ' font-weight="600"' if shape.bold else ""
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    place = f'x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size:g}"'
    return f'<text {place}{weight}{anchor} fill="{shape.fill}">{escape(shape.text)}</text>'


def mix(colour: str, share: float) -> str:
    """`share` of a colour over white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - p) * share):02x}" for p in parts)
