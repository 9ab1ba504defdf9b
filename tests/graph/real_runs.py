"""Real runs of small models on the CPU: what traces are held to."""

from pathlib import Path

import torch
from graph_models import EXAMPLES
from torch import Tensor, nn

from planner.graph.load import Batch, LoadedModel, load_model

ZOO = Path(__file__).parent / "zoo"

MODELS = {
    "gpt": EXAMPLES / "gpt.py",
    "llama": EXAMPLES / "llama.py",
    "mlp": EXAMPLES / "mlp.py",
    **{
        name: ZOO / f"{name}.py"
        for name in (
            "custom_function",
            "deepseek",
            "dit",
            "gpt_dropout",
            "lora",
            "lstm",
            "moe",
            "resnet",
            "t5",
            "tied",
            "unet",
            "vit",
        )
    },
}
"""Model files of all kinds, small enough to run."""


def load(name: str) -> LoadedModel:
    return load_model(str(MODELS[name]))


def build(loaded: LoadedModel, size: int) -> tuple[nn.Module, Batch]:
    """A model with real weights and a microbatch."""
    torch.manual_seed(0)
    return loaded.make_model(), loaded.example_batch(size)


def run_loss(loaded: LoadedModel, model: nn.Module, batch: Batch) -> Tensor:
    return loaded.loss(model(*batch.args), batch.targets)
