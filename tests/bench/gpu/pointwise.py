"""Times kernels that go element by element: operands alike, laid out differently, of two dtypes.

    python tests/bench/gpu/pointwise.py profiles/measured/h200-sxm/pointwise.csv

Needs torch and a GPU, and takes a minute. Prints the rates that a device's profile has of them, the
medians over the largest operands. torch calls a kernel of its own for each way (TensorIterator).
"""

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

COLUMNS = 4096
SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
CALLS, ROUNDS, WARM_UP = 20, 3, 3
BUSY = 20
"""Writes of 1 GiB that the device has before it, so that the host is ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kernel at one size."""

    kernel: str
    operands: str
    """As ``OpNode.operands``."""
    elements: int
    """That it makes."""
    moved_bytes: int
    """That it reads and writes, each tensor once."""
    seconds: float


Kernel = tuple[str, str, int, float, Callable[[], object]]
"""Name, operands, elements, bytes of each element, call."""


def kernels(rows: int) -> Iterator[Kernel]:
    """List the kernels on operands of so many rows."""

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    number = rows * COLUMNS
    a, b = drawn(rows, COLUMNS), drawn(rows, COLUMNS)
    x, y = (drawn(rows, COLUMNS, dtype=torch.float32) for _ in range(2))
    row, wide_row = drawn(COLUMNS), drawn(COLUMNS, dtype=torch.float32)
    heads, pairs = a.view(rows, 32, 128), a.view(rows, 32, 64, 2)
    angles = drawn(rows, 1, 64, dtype=torch.float32)
    yield "add bf16", "even", number, 6, lambda: a + b
    yield "add f32", "even", number, 12, lambda: x + y
    yield "gelu bf16", "even", number, 4, lambda: torch.nn.functional.gelu(a)
    yield "f32 in bf16", "even", number, 6, lambda: x.to(torch.bfloat16)
    yield "bf16 times row", "strided", number, 4, lambda: a * row
    yield "f32 times row", "strided", number, 8, lambda: x * wide_row
    yield "half of each head", "strided", number // 2, 4, lambda: -heads[..., 64:]
    yield "heads before tokens", "strided", number, 4, lambda: heads.transpose(0, 1).contiguous()
    yield (
        "halves in turn", "strided", number, 4,
        lambda: torch.cat((heads[..., 64:], heads[..., :64]), -1),
    )  # fmt: skip
    yield "f32 times bf16", "cast", number, 10, lambda: x * a
    yield "bf16 added to f32", "cast", number, 10, lambda: x.add_(a)
    yield "bf16 in f32", "cast", number, 6, lambda: a.float()
    yield "f32 times bf16 row", "cast", number, 8, lambda: x * row
    yield "bf16 times angles", "cast", number // 2, 6, lambda: pairs[..., 0] * angles


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call on the device, the least of some rounds."""
    ahead = torch.empty(1 << 28, device="cuda")
    for _ in range(WARM_UP):
        call()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(BUSY):
            ahead.zero_()
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / CALLS * 1e-3)
    return min(found)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, metavar="CSV")
    options = parser.parse_args()
    found = [
        Row(
            kernel=name, operands=operands, elements=elements,
            moved_bytes=round(elements * size), seconds=timed(call),
        )
        for number in SIZES
        for name, operands, elements, size, call in kernels(number // COLUMNS)
    ]  # fmt: skip
    with options.table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(found[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in found)
    for operands in ("strided", "cast"):
        rates = [
            row.elements / row.seconds
            for row in found
            if row.operands == operands and row.elements >= SIZES[-1] // 2
        ]
        print(f"{operands}: {statistics.median(rates) / 1e9:.0f} G elements per second")


if __name__ == "__main__":
    main()
