"""The same training on one process."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .checkpoint import Checkpointer
from .checkpoint_folders import newest_checkpoint
from .data import Batches, mixed_seed, split_microbatches
from .log import Expected, Log
from .model import run_model
from .options import Options
from .part import trained_parameters
from .start import built_whole
from .stopping import StopRequest
from .trees import Tree, cast_floats


def train_reference(
    batches: Batches,
    options: Options,
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    microbatch_size: int,
    max_grad_norm: float,
    expected: Expected,
) -> int:
    """Train the plain model on one process: same weights, same global batches, same optimiser.

    Returns:
        The exit code.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = newest_checkpoint(options.checkpoint) if options.resume else None
    model = built_whole(batches.model, batches.seed, options).to(device)
    optimizer = make_optimizer(trained_parameters(model))
    checkpointer = Checkpointer(modules=[model], optimizers=[optimizer])
    first = checkpointer.start(None, checkpoint)
    stop = StopRequest()
    log = Log(options=options, expected=expected, device=device)
    num_microbatches = batches.global_batch_size // microbatch_size
    for step in range(first, options.steps):
        log.start_step()
        torch.manual_seed(mixed_seed(batches.seed, step, 0, 0))
        batch = tree_map_only(Tensor, lambda t: t.to(device), batches.global_batch(step))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, targets in split_microbatches(batch, num_microbatches):
            output = _run_reference(model, cast_floats(inputs, options.dtype), options)
            part = batches.model.loss(output, targets) / num_microbatches
            torch.autograd.backward(part)
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        stops = log.end_step(step + 1, loss, norm, stops=stop.asked)
        checkpointer.end_step(options, step + 1, stops=stops)
        if stops:
            return stop.exit_code(options, step + 1)
    return 0


def _run_reference(model: nn.Module, inputs: Tree, options: Options) -> Tree:
    """Run the plain model with its parameters cast to the compute dtype."""
    if options.dtype is options.master_dtype:
        return run_model(model, inputs)
    cast = {name: p.to(options.dtype) for name, p in model.named_parameters()}
    keywords = inputs if isinstance(inputs, Mapping) else {}
    args = () if keywords else inputs if isinstance(inputs, tuple | list) else (inputs,)
    return torch.func.functional_call(model, cast, tuple(args), dict(keywords))
