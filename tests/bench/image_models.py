"""Plans an image model of each of timm's modules in its own size, and checks what scripts hold.

``python tests/bench/image_models.py [--only MODULE ...] [OPTION ...]``; options are those of
``plan``, by default ``--gpus 8 --global-batch-size 256``. Needs timm and torchvision, which the
project does not. Of a module the model nearest to 40 M parameters is taken. Exits with 1 where one
is refused, or where memory or collectives are not as planned.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
from timm.models import model_entrypoint

PLAN = "import sys; from planner.cli.main import run; sys.exit(run(sys.argv[1:]))"
OPTIONS = ("--gpus", "8", "--global-batch-size", "256")
PARAMETERS = 40e6
TRIED = 12
"""Models of a module that are built to know their size."""
LARGE = re.compile(r"giant|gigantic|huge|enormous|_[2-9]b\b|384|448|512")

MODEL = """
import timm, torch
from torch.nn import functional

def build_model():
    return timm.create_model({name!r})

def example_batch(microbatch_size):
    images = torch.randn(microbatch_size, *{size!r})
    return images, torch.randint(1000, (microbatch_size,))

def loss_fn(scores, classes):
    scores = scores if isinstance(scores, (tuple, list)) else [scores]
    return sum(functional.cross_entropy(each, classes) for each in scores)
"""


def representatives(only: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Module, name and size of images of a model each."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models():
        names[model_entrypoint(name).__module__.rpartition(".")[2]].append(name)
    for module, known in sorted(names.items()):
        if only and module not in only:
            continue
        sizes = {}
        for name in [each for each in known if not LARGE.search(each)][:TRIED]:
            with torch.device("meta"):
                model = timm.create_model(name)
            parameters = sum(each.numel() for each in model.parameters())
            sizes[abs(parameters - PARAMETERS), name] = model.default_cfg["input_size"]
        if sizes:
            (_, name), size = min(sizes.items())
            yield module, name, size


def checked(folder: Path, options: Sequence[str]) -> tuple[bool, str]:
    """Plan a model, check its plan, and say how both ended."""
    command = (sys.executable, "-c", PLAN)
    plan = [*command, str(folder / "model.py"), "--out", str(folder / "plan"), "--quiet", *options]
    done = subprocess.run(plan, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or "nothing said").splitlines()[0]
        return False, f"refused, exit code {done.returncode}: {said[:160]}"
    check = [*command, "check", str(folder / "plan"), "--json"]
    done = subprocess.run(check, capture_output=True, text=True)
    if not done.stdout.strip():
        return False, f"check ended with {done.returncode}: {done.stderr.strip()[:160]}"
    shares = (
        each["predicted_peak_bytes"] / each["tracked_peak_bytes"] - 1
        for each in json.loads(done.stdout)["stages"]
    )
    return not done.returncode, " ".join(f"{share:+.1%}" for share in shares)


def main() -> int:
    """Check a model of each module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODULE", default=())
    given, options = parser.parse_known_args()
    off = 0
    for module, name, size in representatives(given.only):
        with TemporaryDirectory() as folder:
            Path(folder, "model.py").write_text(MODEL.format(name=name, size=tuple(size)))
            holds, words = checked(Path(folder), options or OPTIONS)
        off += not holds
        print(f"{module} {name}: {words}{'' if holds else '  OFF'}", flush=True)
    print(f"{off} refused or off")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
