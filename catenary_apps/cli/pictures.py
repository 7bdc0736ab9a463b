"""Pictures of commands: the type of the options that name their files, and how matplotlib writes them."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from catenary.config import ConfigError
from catenary_apps.cli.output import INSTALL_BENCH, check_file, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = 64
_DPI = 110


def _drawable(path: Path) -> Path:
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError("must end with .svg or .png")
    return path


PictureFile = Annotated[Path, AfterValidator(_drawable)]
"""The type of an option that names a file to draw into."""


def require_matplotlib(option: str) -> None:
    """Raise ConfigError that names the option and the extra if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option}: matplotlib is missing: {INSTALL_BENCH}")


def check_picture(file: Path, option: str) -> None:
    """Check that the picture can be drawn and written, before the work that it shows. Raises ConfigError."""
    require_matplotlib(option)
    check_file(file, option)


def write_picture(file: Path, figure: Figure, option: str) -> None:
    """Write the figure as SVG or PNG, by the file's suffix. Raises StartRefused, one line."""
    if file.suffix.lower() == ".png":
        write_file(file, png_of(figure, dpi=_DPI), option)
        return
    from matplotlib import rc_context

    drawn = BytesIO()
    # The same figure gives the same bytes, and its texts can be searched.
    with rc_context({"svg.hashsalt": "catenary", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_file(file, drawn.getvalue(), option)


def png_of(figure: Figure, *, dpi: int = _DPI) -> bytes:
    """Return the figure as PNG with a palette: lines and bars take a quarter of the bytes so."""
    # Comes with matplotlib.
    from PIL import Image

    drawn, reduced = BytesIO(), BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(_COLOURS).save(reduced, format="PNG", optimize=True)
    return reduced.getvalue()
