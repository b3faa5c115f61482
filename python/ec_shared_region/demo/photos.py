"""Photographs: which there are, how many patches each gives, and their pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .messages import DemoError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["PATCH_PIXELS", "SUFFIXES", "Photograph", "in_folder", "in_package", "patch_grid", "pixels", "survey"]

PATCH_PIXELS = 14
"""Side of a patch, as in the ViT-L/14 family."""

SUFFIXES = frozenset({".avif", ".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

# Of the pictures inside scikit-image's wheel, those that a camera took; the rest are drawings, text and
# test patterns.
_IN_SCIKIT_IMAGE = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "retina.jpg",
    "rocket.jpg",
)


# A folder of something else is told by the first few.
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Photograph:
    """A photograph and the grid of patches that it is cut into; one patch is one row is one block."""

    path: str
    grid_rows: int
    grid_columns: int

    @property
    def rows(self) -> int:
        return self.grid_rows * self.grid_columns


def in_folder(folder: Path) -> list[Path]:
    """The photographs directly in ``folder``, by suffix, in order of their names."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    except OSError as error:
        raise DemoError(f"cannot read the folder `{folder}`: {error.strerror}", exit_code=2) from error
    if not paths:
        raise DemoError(
            f"no photographs in `{folder}`",
            hint=f"files with these suffixes are taken, subfolders are not: {' '.join(sorted(SUFFIXES))}",
            exit_code=2,
        )
    return paths


def in_package() -> list[Path]:
    """The photographs that scikit-image ships inside its wheel. The package is found, not imported."""
    spec = find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            "no photographs: scikit-image, which ships some, is not installed",
            hint="pip install 'ec-shared-region[demo]', or give a folder of your own with --images",
        )
    folder = Path(spec.submodule_search_locations[0], "data")
    paths = [folder / name for name in _IN_SCIKIT_IMAGE if (folder / name).is_file()]
    if not paths:
        raise DemoError(
            f"no photographs: this scikit-image ships none in `{folder}`",
            hint="give a folder of your own with --images",
        )
    return paths


def patch_grid(width: int, height: int, max_patches: int) -> tuple[int, int]:
    """Rows and columns of whole patches for an image of ``width`` x ``height`` pixels.

    Both sides go to the nearest multiple of a patch; an image that has more than ``max_patches`` is made
    smaller first, as image processors do.
    """
    shrink = min(1.0, PATCH_PIXELS * math.sqrt(max_patches / (width * height)))
    rows = max(1, round(height * shrink / PATCH_PIXELS))
    columns = max(1, round(width * shrink / PATCH_PIXELS))
    # Rounding up on both sides, or a side held at one patch, can still be over.
    if rows > columns:
        rows = max(1, min(rows, max_patches // columns))
    columns = max(1, min(columns, max_patches // rows))
    return rows, columns


def survey(paths: list[Path], max_patches: int, advance: Callable[[int, int], None]) -> tuple[Photograph, ...]:
    """Reads every photograph once, so that those that are broken are an error before anything is started."""
    photographs = []
    broken: list[DemoError] = []
    for number, path in enumerate(paths):
        advance(number, len(paths))
        try:
            with _upright(path) as image:
                rows, columns = patch_grid(image.width, image.height, max_patches)
        except DemoError as error:
            broken.append(error)
            continue
        photographs.append(Photograph(str(path), rows, columns))
    if broken:
        shown = [error.text for error in broken[:_MOST_NAMED]]
        if len(broken) > _MOST_NAMED:
            shown.append(f"and {len(broken) - _MOST_NAMED} more")
        hint = (
            "take it out of the folder, or repair it"
            if len(broken) == 1
            else "take them out of the folder, or repair them"
        )
        raise DemoError("\n".join(shown), hint=hint, exit_code=2)
    return tuple(photographs)


def pixels(photograph: Photograph) -> bytearray:
    """RGB pixels, 8 bits each, resized to whole patches: C-contiguous (height, width, 3)."""
    from PIL import Image

    size = (photograph.grid_columns * PATCH_PIXELS, photograph.grid_rows * PATCH_PIXELS)
    with _upright(Path(photograph.path)) as image:
        return bytearray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC).tobytes())


@contextmanager
def _upright(path: Path) -> Iterator[Image.Image]:
    """The decoded image, turned as its camera says that it is to be seen."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            upright.load()
    # What Pillow's decoders raise.
    except (OSError, EOFError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "its format is not known" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DemoError(
            f"cannot read the photograph `{path}`: {reason}",
            hint="take it out of the folder, or repair it",
            exit_code=2,
        ) from error
    yield upright
