"""An LSTM language model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128


class LSTMModel(nn.Module):
    def __init__(self, vocabulary: int, dim: int, layers: int, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(tokens))
        return self.head(states)


def build_model() -> nn.Module:
    """A small model that trains in seconds on a CPU."""
    return LSTMModel(VOCABULARY, dim=48, layers=2)


def lstm_large() -> nn.Module:
    """Four layers of 1024, as used for language models before transformers."""
    return LSTMModel(32000, dim=1024, layers=4, dropout=0.1)


def example_batch(microbatch_size: int, seq_len: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (microbatch_size, seq_len + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
