"""Vision transformer (Dosovitskiy et al., 2020, arXiv:2010.11929)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, constant_pad_nd, nn

from regimen.models.layers import Block, NetworkError, height_width, initialise


class ViT(nn.Module):
    """Patch embedding, positions, pre-norm blocks and a linear head.

    The blocks are `blocks.0`, `blocks.1`, ...: layer-wise learning rates rely on these names.
    pool: what the head is given: "cls", the output at a class token, or "mean", that over all
    patches, without a class token.
    positions: "learned", or "sincos", fixed ones (`sincos_positions`).
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 16,
        patch_size: int = 4,
        dim: int = 192,
        depth: int = 12,
        heads: int = 3,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        pool: Literal["cls", "mean"] = "cls",
        positions: Literal["learned", "sincos"] = "learned",
    ) -> None:
        super().__init__()
        height, width = height_width(image_size)
        if height % patch_size or width % patch_size:
            raise NetworkError(
                f"images of {height}x{width} cannot be divided into patches of "
                f"model.patch_size={patch_size}"
            )
        self.image_size = (height, width)
        rows = height // patch_size
        columns = width // patch_size
        self.patch_embed = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        self.cls_token: nn.Parameter | None = None
        class_tokens = 0
        if pool == "cls":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            class_tokens = 1
        self.pos_embed: Tensor
        if positions == "learned":
            self.pos_embed = nn.Parameter(torch.zeros(1, class_tokens + rows * columns, dim))
        else:
            fixed = sincos_positions(rows, columns, dim)
            # A class token has no place: its position is 0.
            self.register_buffer("pos_embed", constant_pad_nd(fixed, (0, 0, class_tokens, 0))[None])
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dim, heads, mlp_ratio, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        initialise(self)
        for parameter in (self.pos_embed, self.cls_token):
            if isinstance(parameter, nn.Parameter):
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, *image_size) to logits (N, num_classes)."""
        if tuple(x.shape[-2:]) != self.image_size:
            height, width = self.image_size
            raise NetworkError(
                f"the images have size {x.shape[-2]}x{x.shape[-1]}, "
                f"but model.image_size is {height}x{width}"
            )
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], dim=1)
        tokens = self.blocks(self.dropout(tokens + self.pos_embed))
        if self.cls_token is None:
            return self.head(self.norm(tokens).mean(1))  # type: ignore[no-any-return]
        return self.head(self.norm(tokens[:, 0]))  # type: ignore[no-any-return]


def sincos_positions(rows: int, columns: int, dim: int) -> Tensor:
    """Return fixed positions (rows * columns, dim) of a grid, as Beyer et al. 2022 compute them.

    A quarter of the dimensions each: sine and cosine of the column, sine and cosine of the row,
    with wavelengths from 2 pi to 10,000 * 2 pi. Raises NetworkError unless 4 divides `dim`.
    """
    if dim % 4 or dim < 8:
        raise NetworkError(f"model.dim={dim}: positions=sincos needs a multiple of 4, 8 or more")
    frequencies = 10_000 ** -torch.linspace(0, 1, dim // 4)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    by_column = column.flatten()[:, None] * frequencies
    by_row = row.flatten()[:, None] * frequencies
    return torch.cat([by_column.sin(), by_column.cos(), by_row.sin(), by_row.cos()], dim=1)
