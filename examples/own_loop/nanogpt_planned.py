"""nanoGPT's loop under a plan: `nanogpt_single.py` with the model in `parallelize`.

plan nanogpt_model.py --gpus 4 --out plans/nanogpt --global-batch-size 16
torchrun --standalone --nproc-per-node 4 nanogpt_planned.py --text input.txt --plan plans/nanogpt
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from nanogpt_model import GPT, GPTConfig
from torch import Tensor, nn

import planner.runtime

BATCH_SIZE, ACCUMULATION_STEPS = 8, 2
LEARNING_RATE, WARMUP_STEPS, DECAY_STEPS = 1e-3, 10, 1000
EVAL_STEPS = 5


def read_tokens(text: Path) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(list(text.read_bytes()))
    return tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]


def get_batch(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.stack([tokens[i : i + GPTConfig.block_size] for i in starts.tolist()])
    y = torch.stack([tokens[i + 1 : i + 1 + GPTConfig.block_size] for i in starts.tolist()])
    return x, y


def starts_of(tokens: Tensor, step: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(len(tokens) - GPTConfig.block_size, (count,), generator=generator)


def configure_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for _, parameter in named:
        groups[parameter.dim() < 2].append(parameter)
    decayed, others = groups
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
    )


def lr_schedule(step: int) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, step / DECAY_STEPS)))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--plan", type=Path, required=True)
    options = parser.parse_args(arguments)
    train, held_out = read_tokens(options.text)
    torch.manual_seed(1337)
    model = planner.runtime.parallelize(
        GPT(GPTConfig()),
        options.plan,
        configure_optimizer=configure_optimizer,
        lr_schedule=lr_schedule,
    )
    rank, size = model.data_parallel_rank, model.data_parallel_size
    losses = []
    for step in range(model.load(options.out), options.steps):
        starts = starts_of(train, step, BATCH_SIZE * ACCUMULATION_STEPS)
        loss = model.step((get_batch(train, starts.chunk(size)[rank]), None)).item()
        print(f"step {step}: loss {loss:.4f}")
        losses.append(loss)
        if (step + 1) % EVAL_STEPS == 0:
            starts = starts_of(held_out, 0, BATCH_SIZE * ACCUMULATION_STEPS)
            held_out_loss = model.evaluate([(get_batch(held_out, starts.chunk(size)[rank]), None)])
            print(f"held out: {held_out_loss:.4f}")
            losses.append(float(held_out_loss))
    model.save(options.out)
    model.close()
    return losses


if __name__ == "__main__":
    main()
