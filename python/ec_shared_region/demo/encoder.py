"""The patch embedding: pixels to encoder outputs, the same bits in every process that computes them."""

from __future__ import annotations

import torch

from .photos import PATCH_PIXELS, Photograph, pixels

__all__ = ["PatchEmbedding"]

_PATCH_VALUES = 3 * PATCH_PIXELS * PATCH_PIXELS
_LIMIT = 127
_CLIP_SIGMAS = 4.0
# About one standard deviation of the pixels of a photograph: outputs are then of the order of 1.
_PIXEL_SCALE = 64.0
_POSITION_SIGMA = 0.02


class PatchEmbedding:
    """First layer of a vision transformer: a convolution whose stride is its kernel, 14 x 14, and positions.

    Weights and pixels are int8, as in a quantised encoder, and are multiplied as float32: each product and
    each partial sum is a whole number below 2**24, so the sums are exact in any order. That is what lets
    processes compute the same outputs bit for bit, whatever the number of threads and the blocking that
    the matrix product chooses. Everything after the sums is element by element.

    :param hidden_size: length of an output row.
    :param seed: of weights and positions.
    :param grid_side: patches along the longest side of any photograph to come.
    """

    def __init__(self, hidden_size: int, seed: int, grid_side: int) -> None:
        random = torch.Generator().manual_seed(seed)
        normal = torch.randn(hidden_size, _PATCH_VALUES, generator=random)
        self.weight = (normal * (_LIMIT / _CLIP_SIGMAS)).round_().clamp_(-_LIMIT, _LIMIT).to(torch.int8)
        """int8 (hidden_size, 588), a patch in the order y, x, channel."""
        self._matrix = self.weight.t().to(torch.float32).contiguous()
        self.scale = _CLIP_SIGMAS / (_LIMIT * _PIXEL_SCALE * _PATCH_VALUES**0.5)
        """What a sum is multiplied by."""
        # Learned positions are a table for the rows of the grid and one for its columns. They also make
        # two patches of plain sky differ, so that rows that change places are seen.
        self.row_positions = torch.randn(grid_side, hidden_size, generator=random) * _POSITION_SIGMA
        self.column_positions = torch.randn(grid_side, hidden_size, generator=random) * _POSITION_SIGMA

    def encode(self, photograph: Photograph) -> torch.Tensor:
        """Encoder outputs: bfloat16 (photograph.rows, hidden_size), contiguous, one row for each patch."""
        rows, columns = photograph.grid_rows, photograph.grid_columns
        image = torch.frombuffer(pixels(photograph), dtype=torch.uint8)
        patches = (
            image.view(rows, PATCH_PIXELS, columns, PATCH_PIXELS, 3)
            .permute(0, 2, 1, 3, 4)
            .reshape(photograph.rows, _PATCH_VALUES)
        )
        outputs = (patches.to(torch.float32) - 128.0) @ self._matrix
        outputs *= self.scale
        grid = outputs.view(rows, columns, -1)
        grid += self.row_positions[:rows, None]
        grid += self.column_positions[None, :columns]
        return outputs.to(torch.bfloat16)
