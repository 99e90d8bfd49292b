"""The network: an LSTM between an embedding and an output layer."""

from torch import Tensor, nn

Hidden = tuple[Tensor, Tensor]  # state and cell, both (layers, n, width)


class WordLSTM(nn.Module):
    """Map words (n, length), and the state before them, to logits and the state behind them."""

    def __init__(
        self,
        words: int,
        width: int = 200,
        layers: int = 2,
        dropout: float = 0.2,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(width, words)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Return logits (n, length, words) and the new state; None stands for zeros."""
        outputs, hidden = self.lstm(self.dropout(self.encoder(words)), hidden)
        return self.decoder(self.dropout(outputs)), hidden
