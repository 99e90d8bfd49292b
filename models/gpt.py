"""A small causal language model like GPT-2 (Radford et al., 2019)."""

import math

import torch
from torch import Tensor, nn

from regimen.models.layers import Block, NetworkError, initialise


class GPT(nn.Module):
    """Token and position embeddings, causal blocks and an output layer.

    num_classes: the size of the vocabulary. context: the longest input, in tokens.
    tie_weights: make the output layer and the token embedding one parameter.
    """

    def __init__(
        self,
        num_classes: int,
        context: int = 128,
        dim: int = 128,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embed = nn.Embedding(num_classes, dim)
        self.pos_embed = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        blocks = (Block(dim, heads, mlp_ratio, dropout, causal=True) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes, bias=False)
        initialise(self)
        # As GPT-2: 2 * depth branches are added to the residual stream. Their weights are scaled so
        # that its variance does not grow with the depth.
        for name, weight in self.blocks.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
                nn.init.trunc_normal_(weight, std=0.02 / math.sqrt(2 * depth))
        if tie_weights:
            self.head.weight = self.token_embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (N, T), T <= context, to logits (N, T, num_classes)."""
        length = tokens.shape[-1]
        if length > self.context:
            raise NetworkError(
                f"the input has {length} tokens, but model.context is {self.context}"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embed(tokens) + self.pos_embed(positions))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]
