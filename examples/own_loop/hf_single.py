"""A Hugging Face model fine-tuned on a text file, on one device, by the usual loop.

python hf_single.py --model gpt2 --text input.txt
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

BATCH_SIZE, SEQ_LEN, EPOCHS = 8, 32, 2


class TextBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of a text, a token a byte: a tokenizer would do the same with words."""

    def __init__(self, text: Path) -> None:
        tokens = torch.tensor(list(text.read_bytes()))
        self.blocks = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def configure_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=5e-4)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, use_cache=False)
    model.train().to(device)
    data = TextBlocks(options.text)
    loader = DataLoader(data, batch_size=BATCH_SIZE, drop_last=True)
    optimizer = configure_optimizer(model.named_parameters())
    num_steps = EPOCHS * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, num_steps)
    losses = []
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
