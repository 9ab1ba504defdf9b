"""nanoGPT's loop on one device: decay groups, warmup and cosine, accumulation, clipping.

python nanogpt_single.py --text input.txt
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from nanogpt_model import GPT, GPTConfig
from torch import Tensor, nn

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
    options = parser.parse_args(arguments)
    train, held_out = read_tokens(options.text)
    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(GPTConfig()).to(device)
    optimizer = configure_optimizer(model.named_parameters())
    losses = []
    for step in range(options.steps):
        starts = starts_of(train, step, BATCH_SIZE * ACCUMULATION_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * lr_schedule(step)
        loss = 0.0
        for micro_starts in starts.chunk(ACCUMULATION_STEPS):
            x, y = get_batch(train, micro_starts)
            _, micro_loss = model(x.to(device), y.to(device))
            (micro_loss / ACCUMULATION_STEPS).backward()
            loss += micro_loss.item() / ACCUMULATION_STEPS
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.4f}")
        losses.append(loss)
        if (step + 1) % EVAL_STEPS == 0:
            x, y = get_batch(held_out, starts_of(held_out, 0, BATCH_SIZE * ACCUMULATION_STEPS))
            with torch.no_grad():
                _, held_out_loss = model.eval()(x.to(device), y.to(device))
            model.train()
            print(f"held out: {held_out_loss:.4f}")
            losses.append(float(held_out_loss))
    options.out.mkdir(exist_ok=True)
    torch.save(model.state_dict(), options.out / "model.pt")
    return losses


if __name__ == "__main__":
    main()
