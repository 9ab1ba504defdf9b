"""A Hugging Face model fine-tuned under a plan: `hf_single.py` with the model in `parallelize`.

plan gpt2/config.json --gpus 4 --out plans/gpt2 --global-batch-size 8 --seq-len 32
torchrun --standalone --nproc-per-node 4 hf_planned.py --model gpt2 --text input.txt \\
    --plan plans/gpt2
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

import planner.runtime

SEQ_LEN, EPOCHS = 32, 2


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
    parser.add_argument("--plan", type=Path, required=True)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model, use_cache=False)
    model = planner.runtime.parallelize(
        model.train(), options.plan, configure_optimizer=configure_optimizer
    )
    data = TextBlocks(options.text)
    sampler = DistributedSampler(
        data, model.data_parallel_size, model.data_parallel_rank, shuffle=False
    )
    loader = DataLoader(data, batch_size=model.batch_size, sampler=sampler, drop_last=True)
    num_steps = EPOCHS * len(loader)
    schedulers = [get_linear_schedule_with_warmup(o, 2, num_steps) for o in model.optimizers]
    losses = []
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = model.step(batch)
            for scheduler in schedulers:
                scheduler.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    model.close()
    return losses


if __name__ == "__main__":
    main()
