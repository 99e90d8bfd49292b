"""Parts that several networks share: activations by name, the transformer block, their errors."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regimen.conf.errors import ConfigError


class NetworkError(ConfigError, ValueError):
    """A model cannot be built from its configuration."""


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def make_activation(name: str) -> nn.Module:
    """Return a new activation module; quantization and hooks need one for each use."""
    if name not in ACTIVATIONS:
        raise NetworkError(f"unknown activation {name!r}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def height_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of `size`: one number for a square, or both."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


class Attention(nn.Module):
    """Multi-head self-attention; with `causal` a position attends to itself and earlier ones."""

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if dim % heads:
            raise NetworkError(f"model.dim={dim} is not a multiple of model.heads={heads}")
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.proj_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, dim) to (N, T, dim)."""
        n, t, dim = x.shape
        qkv = self.qkv(x).view(n, t, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # unpacking cannot be scripted
        dropout = self.dropout if self.training else 0.0
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        out = out.transpose(1, 2).reshape(n, t, dim)
        return self.proj_dropout(self.proj(out))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with a GELU between; the inner dimension is `ratio` times as large."""

    def __init__(self, dim: int, ratio: float, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, int(dim * ratio))
        self.act = nn.GELU()
        self.fc2 = nn.Linear(int(dim * ratio), dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, dim) to (N, T, dim)."""
        return self.dropout(self.fc2(self.act(self.fc1(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block (Xiong et al., 2020, arXiv:2002.04745), as in ViT and GPT.

    Attention and feed-forward, each after a LayerNorm and with a shortcut.
    """

    def __init__(
        self, dim: int, heads: int, mlp_ratio: float, dropout: float, causal: bool = False
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout, causal)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim, mlp_ratio, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, dim) to (N, T, dim)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def initialise(model: nn.Module) -> None:
    """Initialize linear and embedding weights from a truncated normal, and biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
