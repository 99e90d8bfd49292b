"""Vision transformer (Dosovitskiy et al., 2020, arXiv:2010.11929)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regimen.models.layers import Block, NetworkError, height_width, initialise


class ViT(nn.Module):
    """Patch embedding, a class token, learned positions, pre-norm blocks and a linear head.

    The blocks are `blocks.0`, `blocks.1`, ...: layer-wise learning rates rely on these names.
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
    ) -> None:
        super().__init__()
        height, width = height_width(image_size)
        if height % patch_size or width % patch_size:
            raise NetworkError(
                f"images of {height}x{width} cannot be divided into patches of "
                f"model.patch_size={patch_size}"
            )
        self.image_size = (height, width)
        patches = height * width // patch_size**2
        self.patch_embed = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, patches + 1, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dim, heads, mlp_ratio, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        initialise(self)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, *image_size) to logits (N, num_classes)."""
        if tuple(x.shape[-2:]) != self.image_size:
            height, width = self.image_size
            raise NetworkError(
                f"the images have size {x.shape[-2]}x{x.shape[-1]}, "
                f"but model.image_size is {height}x{width}"
            )
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        cls_token = self.cls_token.expand(x.shape[0], -1, -1)
        tokens = torch.cat([cls_token, patches], dim=1) + self.pos_embed
        tokens = self.blocks(self.dropout(tokens))
        return self.head(self.norm(tokens[:, 0]))  # type: ignore[no-any-return]
