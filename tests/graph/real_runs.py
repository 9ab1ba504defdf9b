"""Real runs of small models on the CPU: what traces are held to."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from graph_models import EXAMPLES
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.graph.loading.batch import Batch
from planner.graph.loading.load import load_model
from planner.graph.loading.loaded_model import LoadedModel
from planner.graph.operator_graph import OperatorGraph, UnitKind
from planner.graph.recording.kernels import fused_kernels
from planner.graph.trace import trace_model
from planner.runtime import recompute as runtime_recompute
from planner.runtime.recompute import SAVED_OPS, recompute_activations

torch.set_num_threads(1)  # more threads only wait for each other over tensors this small

ZOO = Path(__file__).parent / "zoo"

MODELS = {
    "gpt": EXAMPLES / "gpt.py",
    "llama": EXAMPLES / "llama.py",
    "mlp": EXAMPLES / "mlp.py",
    **{
        name: ZOO / f"{name}.py"
        for name in (
            "codebook",
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


@cache
def traced(name: str, *, size: int, dtype: str = "float32") -> OperatorGraph:
    """A model's graph, which tests only read."""
    return trace_model(load(name), microbatch_size=size, dtype=dtype)


def build(loaded: LoadedModel, size: int) -> tuple[nn.Module, Batch]:
    """A model with real weights and a microbatch."""
    torch.manual_seed(0)
    return loaded.make_model(), loaded.example_batch(size)


def run_loss(loaded: LoadedModel, model: nn.Module, batch: Batch) -> Tensor:
    return loaded.loss(model(*batch.args), batch.targets)


def recompute(
    model: nn.Module,
    graph: OperatorGraph,
    recomputation: str,
    changed_buffers: Sequence[str] = (),
) -> None:
    """Recompute the blocks of a model by the training script's own code."""
    blocks = [unit for unit in graph.units if unit.kind is UnitKind.BLOCK]
    stage = SimpleNamespace(
        block_items=lambda: [(unit.name, model.get_submodule(unit.name)) for unit in blocks],
    )
    recompute_activations(stage, [recomputation] * len(blocks), changed_buffers)


# Live storages ---------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that ops have made and that are still alive, and their peak."""

    def __init__(self, outside: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._outside = {each.untyped_storage()._cdata for each in outside}
        self._live: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._outside or key in self._live:
            return

        def gone(_: object) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Measured:
    """Live bytes of one step beyond parameters, buffers and inputs."""

    kept_bytes: int
    """Between forward and backward, the loss apart."""
    peak_bytes: int


@contextmanager
def collected_among_new_objects():
    """Let the collector pass over what other tests of the process left, which takes seconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@collected_among_new_objects()
def measure(loaded: LoadedModel, graph: OperatorGraph, recomputation: str, size: int) -> Measured:
    """Run a step with the tensors that CUDA's kernels keep."""
    model, batch = build(loaded, size)
    recompute(model, graph, recomputation)
    data = [leaf for leaf in tree_leaves((batch.args, batch.targets)) if isinstance(leaf, Tensor)]
    with (
        kernels_that_keep_as_cuda(),
        LiveBytes([*model.parameters(), *model.buffers(), *data]) as live,
    ):
        loss = run_loss(loaded, model, batch)
        gc.collect()
        # On the CPU the storage of a mean square error has room for all of its terms.
        kept_bytes = live.now - loss.untyped_storage().nbytes()
        loss.backward()
    return Measured(kept_bytes=kept_bytes, peak_bytes=live.peak)


@collected_among_new_objects()
def measure_on_meta(
    loaded: LoadedModel, graph: OperatorGraph, recomputation: str, size: int
) -> Measured:
    """Run a step of a model of any size without data, with the kernels that a trace sees."""
    model = loaded.build_meta(graph.dtype).module
    batch = loaded.example_batch(size)
    compute = getattr(torch, graph.dtype)
    args = [
        each.to("meta", compute if each.is_floating_point() else each.dtype) for each in batch.args
    ]
    targets = batch.targets.to("meta")
    recompute(model, graph, recomputation)
    outside = [*model.parameters(), *model.buffers(), *args, targets]
    with fused_kernels(), LiveBytes(outside) as live:
        loss = loaded.loss(model(*args), targets)
        gc.collect()
        kept_bytes = live.now - loss.untyped_storage().nbytes()
        loss.backward()
    return Measured(kept_bytes=kept_bytes, peak_bytes=live.peak)


# Kernels ---------------------------------------------------------------------------------------


class RmsNorm(torch.autograd.Function):
    """Keeps its input and a statistic per row; the CPU composes it of five ops that keep more."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight = ctx.saved_tensors
        normed = x * scale
        wanted = ctx.needs_input_grad[1]
        grad_weight = (grad * normed).flatten(0, -2).sum(0) if wanted else None
        grad = grad * weight
        mean = (grad * normed).mean(-1, keepdim=True)
        return scale * (grad - normed * mean), grad_weight, None


class Dropout(torch.autograd.Function):
    """Keeps a mask of one byte; the CPU's is as wide as the data."""

    @staticmethod
    def forward(ctx, x, p):
        mask = torch.rand_like(x) > p
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return x * mask * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.scale, None


@torch.library.custom_op("planner_tests::attention", mutates_args=())
def wide_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with values of another width, in one kernel as on CUDA; the CPU has none."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.softmax(scores, -1) @ value
    # Laid out as (batch, tokens, heads, width), so that heads are joined without a copy.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, torch.logsumexp(scores, -1)


def _keep_attention(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _attention_backward(ctx, grad, _):
    query, key, value, out, log_sum = ctx.saved_tensors
    scale = query.shape[-1] ** -0.5
    scores = query @ key.transpose(-2, -1) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.exp(scores.masked_fill(hidden, float("-inf")) - log_sum[..., None])
    grad_weights = grad @ value.transpose(-2, -1)
    grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
    return (
        grad_scores @ key,
        grad_scores.transpose(-2, -1) @ query,
        weights.transpose(-2, -1) @ grad,
    )


wide_attention.register_autograd(_attention_backward, setup_context=_keep_attention)


@contextmanager
def kernels_that_keep_as_cuda() -> Iterator[None]:
    """Replace kernels whose saved tensors differ on the CPU; fused attention's are the same."""
    attend = functional.scaled_dot_product_attention

    def attention(query, key, value, **options):
        if query.shape[-1] == value.shape[-1]:
            return attend(query, key, value, **options)
        assert options == {"is_causal": True}
        return wide_attention(query, key, value)[0]

    def rms_norm(x, _, weight=None, eps=None):
        return RmsNorm.apply(x, weight, eps)

    def dropout(x, p=0.5, training=True, inplace=False):
        assert not inplace
        return Dropout.apply(x, p) if training and p else x

    replaced = {
        (functional, "scaled_dot_product_attention"): attention,
        (functional, "rms_norm"): rms_norm,
        (functional, "dropout"): dropout,
        (runtime_recompute, "SAVED_OPS"): SAVED_OPS | {torch.ops.planner_tests.attention.default},
    }
    before = {place: getattr(*place) for place in replaced}
    for place, new in replaced.items():
        setattr(*place, new)
    try:
        yield
    finally:
        for place, old in before.items():
            setattr(*place, old)
