"""Rectangles and short texts on an SVG or a PNG, without a drawing library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Annotated, Protocol
from xml.sax.saxutils import escape

from pydantic import AfterValidator

Colour = tuple[int, int, int]


def _drawable(path: Path) -> Path:
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError("must end with .svg or .png")
    return path


PictureFile = Annotated[Path, AfterValidator(_drawable)]
"""The type of an option that names a file to draw into."""

# Glyphs of 3 by 5 pixels, a digit 0 .. 7 for each row, the left pixel being 4.
_GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757",
    "7": "71244", "8": "75757", "9": "75717", "a": "07157", "b": "44757", "c": "07447", "d": "11757",
    "e": "75747", "f": "34744", "g": "75717", "h": "44755", "i": "20222", "j": "10117", "k": "45655",
    "l": "22223", "m": "07755", "n": "07555", "o": "07557", "p": "75744", "q": "75711", "r": "07444",
    "s": "34216", "t": "27223", "u": "05557", "v": "05552", "w": "05577", "x": "05255", "y": "55717",
    "z": "07247", ".": "00002", ",": "00024", ":": "02020", "%": "51245", "-": "00700", "/": "11244",
    "(": "24442", ")": "21112",
}  # fmt: skip
_SCALE = 2


class Canvas(Protocol):
    """What a plot is drawn on; sizes in pixels, y downwards."""

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Fills a rectangle."""

    def text(self, x: float, y: float, words: str, colour: Colour) -> None:
        """Writes a line whose upper left corner is (x, y)."""

    def finish(self) -> bytes:
        """The file."""


class SvgCanvas:
    """Collects SVG elements."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Fills a rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="#{bytes(colour).hex()}"/>'
        )

    def text(self, x: float, y: float, words: str, colour: Colour) -> None:
        """Writes a line whose upper left corner is (x, y)."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y + 10:.1f}" fill="#{bytes(colour).hex()}">{escape(words)}</text>'
        )

    def finish(self) -> bytes:
        """The file."""
        return "\n".join([*self._parts, "</svg>\n"]).encode()


class PngCanvas:
    """Paints pixels and writes them as an 8 bit RGB PNG. Letters that it has no glyph for stay blank."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def box(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        """Fills a rectangle; at least one pixel."""
        left, top = max(0, round(x)), max(0, round(y))
        right = min(self._width, max(left + 1, round(x + width)))
        bottom = min(self._height, max(top + 1, round(y + height)))
        line = bytes(colour) * (right - left)
        for row in self._rows[top:bottom]:
            row[3 * left : 3 * right] = line

    def text(self, x: float, y: float, words: str, colour: Colour) -> None:
        """Writes a line whose upper left corner is (x, y)."""
        for index, letter in enumerate(words.lower()):
            for row, bits in enumerate(_GLYPHS.get(letter, "00000")):
                for column in range(3):
                    if int(bits) & (4 >> column):
                        left = x + (4 * index + column) * _SCALE
                        self.box(left, y + row * _SCALE, _SCALE, _SCALE, colour)

    def finish(self) -> bytes:
        """The file."""
        data = b"".join(b"\x00" + bytes(row) for row in self._rows)
        header = struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 6)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in parts
        )
