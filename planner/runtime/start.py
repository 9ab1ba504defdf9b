"""Where training starts: a built model, or one whose parameters are filled in later."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .first_weights import DeferredInit
from .model import UserModel, build_on_cpu, cast_parameters, parameters_on_meta, user_module
from .options import Options
from .trees import tensors_of
from .weights import DrawnWeights, Weights, open_weights

MAX_BUILT_PARAMETERS = 1_000_000_000
"""Larger models are not built whole on every rank: each makes its own shards."""


def build_model(
    model: UserModel, seed: int, options: Options, checkpoint: Path | None
) -> tuple[nn.Module, Weights | None]:
    """Build the whole model under the seed: the same weights for every layout.

    Args:
        model: Where it comes from.
        seed: Seed of its weights.
        options: Where they come from else.
        checkpoint: What will be read into it, in the place of any other weights.

    Returns:
        The model, and the weights that its parameters, then on the meta device, still lack: those
        of ``--init``, or those of a model of more than ``MAX_BUILT_PARAMETERS`` parameters.
        Buffers are real.

    Raises:
        RunError: ``--init`` does not fit the model.
    """
    factory = getattr(user_module(model), model.factory)
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        torch.manual_seed(seed)
        built: nn.Module = factory()
    is_large = sum(parameter.numel() for parameter in built.parameters()) > MAX_BUILT_PARAMETERS
    weights: Weights | None = None
    if checkpoint is None and options.init is not None:
        weights = open_weights(options.init, built)
    elif checkpoint is None and is_large:
        built, weights = _build_deferred(model, seed)
    elif not is_large:
        return build_on_cpu(model, seed, options), None
    return cast_parameters(built, options), weights


def built_whole(model: UserModel, seed: int, options: Options) -> nn.Module:
    """Build the model with real weights on the CPU, those of ``--init`` where it is given."""
    built = build_on_cpu(model, seed, options)
    if options.init is not None:
        weights = open_weights(options.init, built)
        parameters = dict(built.named_parameters())
        with torch.no_grad():
            for name, value in weights.tensors(parameters):
                parameters[name].copy_(value)
    return built


def _build_deferred(model: UserModel, seed: int) -> tuple[nn.Module, Weights]:
    deferred = DeferredInit()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with deferred:
            built: nn.Module = getattr(user_module(model), model.factory)()
    weights = DrawnWeights(deferred, built)
    _make_real(built, deferred)
    return built, weights


def _make_real(model: nn.Module, deferred: DeferredInit) -> None:
    """Make all but the parameters real, and put these on the meta device without exception."""
    on_meta: dict[int, nn.Parameter] = {}

    def real(value: Tensor) -> Tensor:
        is_deferred = value.is_meta and not isinstance(value, nn.Parameter)
        return deferred.value(value) if is_deferred else value

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in on_meta:
                data = parameter.detach().to("meta")
                on_meta[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = on_meta[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else real(buffer)
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and any(t.is_meta for t in tensors_of(value)):
                module.__dict__[name] = tree_map_only(Tensor, real, value)
