"""The runtime of a planned training script: the same file beside every ``train.py``.

It needs torch and the user's model file only, and reads in the order in which a script uses it:

1. options, process group          4. tensor parallelism      7. gradients
2. the user's model and its data   5. recomputation, FSDP2    8. checkpoints
3. pipeline stages                 6. running microbatches    9. log, one-process reference

Words: a *unit* is the prologue (all that runs before the first block, unit 0), a block (block i
is unit i + 1) or the epilogue; a stage holds consecutive units. The *stream* is the first tensor
argument of a block, and what leaves the last block; other tensors that later units read (skip
connections, an encoder's memory) are *carried* beside it. An *axis* belongs to the device mesh, a
*dim* to a tensor.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.util
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Tree: TypeAlias = Any
"""A tensor, or nested tuples, lists and dicts of tensors."""

Args: TypeAlias = tuple[Any, ...]
"""Positional arguments of a call."""

Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of a call."""

Function: TypeAlias = Any
"""A function or ATen op, as torch hands it to a hook."""

Output: TypeAlias = tuple[str, int]
"""A tensor that a module returns: the module's path, and the position among the tensors of its
output in the order of torch's pytree. The module is called once in a forward."""

MAX_BUILT_PARAMETERS = 1_000_000_000
"""Larger models are not built on every rank: their weights are read from ``--init DIR``."""

# ---------------------------------------------------------------------------------------------
# 1. Options and process group
# ---------------------------------------------------------------------------------------------

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command line of a training script."""

    steps: int
    """Optimiser steps in all, those before a resumed checkpoint included."""
    log: Path | None
    """File that gets one JSON object per step."""
    checkpoint: Path | None
    """Folder of checkpoints, one folder per saved step."""
    checkpoint_every: int
    """Steps between checkpoints, 0 for one at the end."""
    resume: bool
    """Go on from the newest checkpoint."""
    init: Path | None
    """Checkpoint to read the first weights from."""
    write_init: Path | None
    """Folder that gets the first weights; nothing is trained."""
    reference: bool
    """Train the plain model on one process."""
    dtype: torch.dtype
    """Compute dtype."""
    timeout_s: float
    """Seconds after which a collective that waits for another rank gives up."""

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of parameters, gradients and optimiser states."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


_LOG_HELP = """write one JSON object per step to this file; under torchrun write --log-file,
since torchrun of Python before 3.12 takes --log for an option of its own"""


def parse_options(
    description: str | None, dtype: str, arguments: Sequence[str] | None = None
) -> Options:
    """Read the command line.

    Args:
        description: Shown by ``--help``.
        dtype: Compute dtype where the command line names none.
        arguments: Command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=10, help="optimiser steps in all (default: 10)")
    add("--log", "--log-file", type=Path, metavar="FILE", help=_LOG_HELP)
    add("--checkpoint", type=Path, metavar="DIR", help="save checkpoints in this folder")
    add("--checkpoint-every", type=int, default=0, metavar="N", help="default: at the end")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--init", type=Path, metavar="DIR", help="read the first weights from this checkpoint")
    add("--write-init", type=Path, metavar="DIR", help="write the first weights, then stop")
    add("--reference", action="store_true", help="train the plain model on one process")
    add("--dtype", choices=tuple(DTYPES), default=dtype, help=f"default: {dtype}")
    add("--timeout-s", type=float, default=600.0, help="limit for a collective (default: 600)")
    options = vars(parser.parse_args(arguments))
    if options["resume"] and options["checkpoint"] is None:
        parser.error("--resume needs --checkpoint DIR, the folder that holds the checkpoints")
    return Options(**{**options, "dtype": DTYPES[options["dtype"]]})


@contextlib.contextmanager
def process_group(world_size: int, timeout_s: float) -> Iterator[torch.device]:
    """Join the process group that torchrun started, and leave it in good order.

    Yields:
        The device of this rank: its GPU with NCCL, or the CPU with gloo.

    Raises:
        RuntimeError: torchrun started another number of processes than the plan has devices.
    """
    if dist.is_initialized():
        yield _local_device()
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise RuntimeError(
            f"this plan is for {world_size} processes, but {started} were started: run "
            f"torchrun --standalone --nproc-per-node {world_size} {sys.argv[0]}, "
            "or python with --reference for one process"
        )
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", "0")
    device = _local_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    dist.barrier()  # without it, ranks that leave early abort the others
    dist.destroy_process_group()


def leave() -> NoReturn:
    """End the process at once after a run that went well.

    When the interpreter takes gloo's threads down one by one, it sometimes aborts ("terminate
    called without an active exception"), and torchrun then reports a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _local_device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        torch.set_num_threads(1)  # the ranks share the cores of this machine
    return torch.device("cpu")


def data_parallel_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's position among the ranks that read different samples, and their count."""
    rank, size = 0, 1
    for axis in ("dp_replicate", "dp_shard"):
        if axis in _axes(mesh):
            rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
            size *= mesh[axis].size()
    return rank, size


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


# ---------------------------------------------------------------------------------------------
# 2. The user's model and its data
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """Where the model comes from: a file or an importable module, and a function in it."""

    file: Path | None = None
    """Python file, None where a module is named."""
    module: str | None = None
    """Importable module, None where a file is named."""
    factory: str
    """Function that builds the model."""
    seq_len: int | None = None
    """``seq_len`` for ``example_batch``, None for its default."""

    def example_batch(self, num_samples: int) -> tuple[Tree, Tree]:
        """Return inputs and targets of this many samples, drawn under torch's current seed."""
        extra = {} if self.seq_len is None else {"seq_len": self.seq_len}
        inputs, targets = _import(self).example_batch(num_samples, **extra)
        return inputs, targets

    def loss(self, output: Tree, targets: Tree) -> Tensor:
        """Return the scalar loss, computed in no less than float32.

        Raises:
            TypeError: The model file has no ``loss_fn`` and the model does not return its loss.
        """
        loss_fn = getattr(_import(self), "loss_fn", None)
        if loss_fn is not None:
            loss = loss_fn(tree_map_only(Tensor, _at_least_float32, output), targets)
        else:
            loss = _returned_loss(output)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise TypeError(
                f"{self.file or self.module} has no loss_fn(output, targets), and the model "
                f"returns a {type(output).__name__} instead of its loss: add one of the two"
            )
        # A copy of one number: FSDP2 warns of outputs that are views.
        whole: Tensor = loss.full_tensor().clone() if isinstance(loss, DTensor) else loss
        return whole


def _returned_loss(output: Tree) -> Tree:
    """Return a scalar output, its "loss", or the one scalar in a tuple of outputs."""
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        scalars = [t for t in output if isinstance(t, Tensor) and t.ndim == 0]
        return scalars[0] if len(scalars) == 1 else None
    return getattr(output, "loss", output)


def _at_least_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


@functools.cache
def _import(model: UserModel) -> ModuleType:
    if model.file is None:
        return importlib.import_module(str(model.module))
    file = model.file.resolve()
    spec = importlib.util.spec_from_file_location(f"user_model_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"the model file {file} is not there: set MODEL in the script")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # files that the model file imports
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_model(model: UserModel, seed: int, options: Options) -> nn.Module:
    """Build the whole model under the seed: the same weights for every layout.

    A model of more than ``MAX_BUILT_PARAMETERS`` parameters, or one whose weights come from
    ``--init``, has its parameters on the meta device (buffers are real); each rank then reads
    its own shards.

    Raises:
        RuntimeError: The model is that large and there is no ``--init``.
    """
    factory = getattr(_import(model), model.factory)
    with parameters_on_meta():
        built: nn.Module = factory()
    num_parameters = sum(parameter.numel() for parameter in built.parameters())
    if options.init is None and num_parameters > MAX_BUILT_PARAMETERS and not options.resume:
        raise RuntimeError(
            f"the model has {num_parameters:,} parameters, too many to be built on every rank "
            f"(limit {MAX_BUILT_PARAMETERS:,}): write the first weights once with "
            "python train.py --write-init DIR, then train with --init DIR"
        )
    if options.init is not None or num_parameters > MAX_BUILT_PARAMETERS:
        return built.to(options.master_dtype)
    return build_on_cpu(model, seed, options)


def build_on_cpu(model: UserModel, seed: int, options: Options) -> nn.Module:
    """Build the model with real weights on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built: nn.Module = getattr(_import(model), model.factory)()
    return built.to(options.master_dtype)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device as modules register them; buffers stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def run_model(model: nn.Module, inputs: Tree) -> Tree:
    """Call the model with a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def cast_floats(tree: Tree, dtype: torch.dtype) -> Tree:
    """Cast floating-point tensors of a tree, leave the others."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Global batches: a pure function of seed and step, whatever the layout."""

    model: UserModel
    """Offers ``example_batch``."""
    global_batch_size: int
    """Samples per step."""
    seed: int
    """Seed of the whole training run."""

    def global_batch(self, step: int) -> tuple[Tree, Tree]:
        """Return inputs and targets of all samples of a step, on the CPU.

        Raises:
            ValueError: A tensor's first dim is not the number of samples.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(self.seed, step))
            batch = self.model.example_batch(self.global_batch_size)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and tensor.shape[:1] != (self.global_batch_size,):
                raise ValueError(
                    f"example_batch({self.global_batch_size}) returned a tensor of shape "
                    f"{tuple(tensor.shape)}: its first dim must be the number of samples"
                )
        inputs, targets = batch
        return inputs, targets

    def of_rank(
        self, step: int, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tree, Tree]:
        """Return this rank's share of a step's batch; tp and pp ranks of a replica share it."""
        rank, size = data_parallel_rank(mesh)
        count = self.global_batch_size // size
        share = self.slice(self.global_batch(step), rank * count, count)
        inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(device), share)
        return cast_floats(inputs, dtype), targets

    @staticmethod
    def slice(batch: Tree, start: int, count: int) -> Tree:
        """Return ``count`` samples of every tensor of a batch."""
        return tree_map_only(Tensor, lambda tensor: tensor[start : start + count], batch)


def _seed(*numbers: int) -> int:
    """Mix numbers into one seed (any order-dependent mix without collisions nearby will do)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % 2**63
    return mixed


def seed_step(seed: int, step: int, mesh: DeviceMesh) -> None:
    """Seed dropout for a step: alike on the tp ranks of one stage, different elsewhere."""
    rank, _ = data_parallel_rank(mesh)
    pp_rank = mesh["pp"].get_local_rank() if "pp" in _axes(mesh) else 0
    torch.manual_seed(_seed(seed, step, rank, pp_rank))


# ---------------------------------------------------------------------------------------------
# 3. Pipeline stages: the user's model with stand-ins for all that other stages run
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Blocks of one stage. The first stage also holds the prologue, the last the epilogue."""

    pp_rank: int
    """Pipeline rank that holds it."""
    first_block: int
    """First block, a position in the list of blocks."""
    end_block: int
    """One past the last block."""
    recompute: tuple[str, ...] = ()
    """"none", "selective" or "full" for each of its blocks; empty for none at all."""
    receives: tuple[Output, ...] = ()
    """What the previous stage sends beside the stream, in this order."""
    stream_output: Output | None = None
    """The output that the received stream is, where more than the first block reads it."""


@dataclass(slots=True, eq=False)
class Sketch:
    """What a tensor of a forward looks like; one object for one tensor."""

    shape: torch.Size
    """Its shape for one microbatch."""
    dtype: torch.dtype
    """Its dtype."""
    requires_grad: bool
    """Whether a gradient flows back through it."""
    is_changed: bool = False
    """Whether the model changes it in place after the module that made it has returned it."""

    def example(self) -> Tensor:
        """Return a meta tensor that looks like it."""
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module in a forward."""

    unit: int
    """Unit that runs when the call returns."""
    output: Tree
    """What it returns, with sketches for its tensors."""
    arguments: tuple[Sketch, ...]
    """The tensors that it gets, where it returns one of them unchanged; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What a dry run on the meta device tells about the model."""

    blocks: tuple[str, ...]
    """Module paths of the blocks in execution order."""
    users: Mapping[str, frozenset[int]]
    """Units that use a parameter, by its first name."""
    runs: Mapping[str, frozenset[int]]
    """Units in which a module outside the blocks is called, by its path."""
    calls: Mapping[str, Sequence[Call]]
    """Calls of the blocks and of all modules outside of them, those that contain blocks too, by
    path."""
    first_names: Mapping[str, str]
    """First name of a parameter by each of its names (tied ones have several)."""
    streams: tuple[Sketch, ...]
    """The stream after each unit but the last."""

    def call(self, output: Output) -> Call:
        """Return the call that makes an output.

        Raises:
            ValueError: There is no such output.
        """
        path, index = output
        calls = self.calls.get(path, ())
        if len(calls) != 1 or index >= len(_sketches(calls[0])):
            raise ValueError(
                f"STAGES does not fit the model: {path!r} is no module that is called once in a "
                f"forward and returns {index + 1} tensors"
            )
        return calls[0]

    def sketch(self, output: Output) -> Sketch:
        """Return the sketch of an output."""
        return _sketches(self.call(output))[output[1]]


def _sketches(call: Call) -> list[Sketch]:
    return [leaf for leaf in tree_leaves(call.output) if isinstance(leaf, Sketch)]


_GROUPED_PRODUCTS = frozenset({"grouped_mm", "_grouped_mm"})
"""Functions of torch that multiply the tokens of each expert by its own weight."""


class _DryRun(TorchFunctionMode):
    """Notes of one forward which unit uses a parameter or a module, and what modules return."""

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.blocks = blocks
        self.unit = 0
        self.users: dict[int, set[int]] = {}
        self.runs: dict[str, set[int]] = {}
        self.calls: dict[str, list[Call]] = {}
        self.streams: list[Sketch] = []
        self._in_block = False
        self._arguments: dict[str, tuple[Sketch, ...]] = {}
        self._seen: dict[tuple[int, int], tuple[Tensor, Sketch]] = {}

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        if getattr(func, "__name__", "") in _GROUPED_PRODUCTS:
            # On the meta device they take bfloat16 only.
            result = func(*cast_floats(args, torch.bfloat16), **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) or _tensors(result):  # reading a shape or dtype is no use
            for value in _tensors((args, kwargs)):
                if isinstance(value, nn.Parameter):
                    self.users.setdefault(id(value), set()).add(self.unit)
        return result

    def watch(self, twin: nn.Module) -> None:
        """Register hooks on the blocks and on the modules outside of them."""
        for index, path in enumerate(self.blocks):
            block = twin.get_submodule(path)
            enter = functools.partial(self._enter_block, index)
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(functools.partial(self._leave_block, index))
        self.runs = {path: set() for path, _ in outer_modules(twin, self.blocks)}
        for path, module in twin.named_modules():
            if path and not _lies_in_any(path, self.blocks):
                enter = functools.partial(self._enter, path)
                module.register_forward_pre_hook(enter, with_kwargs=True)
                module.register_forward_hook(functools.partial(self._leave, path))

    def finish(self) -> None:
        """Note which tensors were changed after they had been returned."""
        for (_, version), (tensor, sketch) in self._seen.items():
            sketch.is_changed = tensor._version != version

    def _enter_block(self, index: int, block: nn.Module, args: Args, kwargs: Kwargs) -> None:
        path = self.blocks[index]
        if index != len(self.streams):
            raise ValueError(f"BLOCKS is not in execution order: {path} runs earlier")
        self.unit = index + 1
        self._enter(path, block, args, kwargs)
        self._in_block = True
        self.streams.append(self._sketch(_stream(args, kwargs)))

    def _leave_block(self, index: int, block: nn.Module, args: Args, output: Tree) -> None:
        self._in_block = False
        self._leave(self.blocks[index], block, args, output)
        if index == len(self.blocks) - 1:
            self.unit += 1
            self.streams.append(self._sketch(_first_tensor(output)))

    def _enter(self, path: str, _: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if path in self.runs:
            self.runs[path].add(self.unit)
        if not self._in_block:
            self._arguments[path] = tuple(self._sketch(t) for t in _tensors((args, kwargs)))

    def _leave(self, path: str, _: nn.Module, __: Args, output: Tree) -> None:
        if self._in_block:
            return
        arguments = self._arguments.pop(path)
        sketches = tree_map_only(Tensor, self._sketch, output)
        hands_on = not set(arguments).isdisjoint(tree_leaves(sketches))
        call = Call(self.unit, sketches, arguments if hands_on else ())
        self.calls.setdefault(path, []).append(call)

    def _sketch(self, tensor: Tensor) -> Sketch:
        sketch = Sketch(tensor.shape, tensor.dtype, tensor.requires_grad)
        # The tensor is kept so that no other gets its id; after a change in place it is another.
        return self._seen.setdefault((id(tensor), tensor._version), (tensor, sketch))[1]


class _KnownData(TorchFunctionMode):
    """Answers what a model asks of data on the meta device, where constants and inputs tell it.

    It notes how each tensor without a parameter behind it is made, and runs that on the CPU when
    the model branches on it. A tensor that was changed in place is not known any more.
    """

    def __init__(self, on_meta: Tree, real: Tree) -> None:
        super().__init__()
        self._known: dict[tuple[int, int], tuple[Tensor, Callable[[], Tensor]]] = {}
        for tensor, data in zip(_tensors(on_meta), _tensors(real), strict=True):
            if not tensor.is_floating_point():
                self._know(tensor, data.detach)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if any(t.is_meta and self._key(t) not in self._known for t in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        on_cpu = functools.cache(lambda: self._run_on_cpu(func, args, kwargs))
        try:
            output = func(*args, **kwargs)
        except RuntimeError:  # it needs data
            return tree_map_only(Tensor, self._known_meta, on_cpu())
        for position, tensor in enumerate(_tensors(output)):
            if tensor.is_meta:
                made = functools.partial(lambda i: _tensors(on_cpu())[i], position)
                self._known.setdefault(self._key(tensor), (tensor, made))
        return output

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, int]:
        return id(tensor), tensor._version

    def _know(self, tensor: Tensor, data: Callable[[], Tensor]) -> None:
        # The tensor is kept so that no other gets its id.
        self._known[self._key(tensor)] = tensor, data

    def _known_meta(self, data: Tensor) -> Tensor:
        tensor = data.to("meta")
        self._know(tensor, lambda: data)
        return tensor

    def _run_on_cpu(self, func: Function, args: Args, kwargs: Kwargs) -> Tree:
        def on_cpu(leaf: Tree) -> Tree:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            is_meta = isinstance(leaf, Tensor) and leaf.is_meta
            return self._known[self._key(leaf)][1]() if is_meta else leaf

        cpu_args, cpu_kwargs = tree_map(on_cpu, (args, kwargs))
        return func(*cpu_args, **cpu_kwargs)


def examine(
    model: nn.Module, blocks: Sequence[str], microbatch: Tree, dtype: torch.dtype
) -> Anatomy:
    """Run the model once on the meta device and note what runs where.

    Args:
        model: The whole model; it is not changed.
        blocks: Module paths of the blocks in execution order.
        microbatch: Inputs of one microbatch.
        dtype: Compute dtype.

    Raises:
        ValueError: The blocks do not run in this order.
    """
    twin = _meta_twin(model, dtype)
    run = _DryRun(blocks)
    run.watch(twin)
    inputs = cast_floats(tree_map_only(Tensor, lambda t: t.to("meta"), microbatch), dtype)
    with run, _KnownData(inputs, microbatch):
        run_model(twin, inputs)
    run.finish()

    first_by_id: dict[int, str] = {}
    first_names, users = {}, {}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        first = first_by_id.setdefault(id(parameter), name)
        first_names[name] = first
        users[first] = frozenset(run.users.get(id(parameter), {0}))
    return Anatomy(
        blocks=tuple(blocks),
        users=users,
        runs={path: frozenset(units) for path, units in run.runs.items()},
        calls=run.calls,
        first_names=first_names,
        streams=tuple(run.streams),
    )


def outer_modules(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of all modules that neither lie in a block nor contain one."""
    for path, module in model.named_modules():
        contains = any(block.startswith(f"{path}.") for block in blocks)
        if path and not contains and not _lies_in_any(path, blocks):
            yield path, module


def _lies_in_any(path: str, blocks: Sequence[str]) -> bool:
    """Say whether a module is one of the blocks or lies in one."""
    return any(f"{path}.".startswith(f"{block}.") for block in blocks)


def _meta_twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        floating = parameter.is_floating_point()
        data = parameter.detach().to("meta", dtype if floating else None)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _stream(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the stream among a block's arguments: its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise TypeError("a block was called without a tensor: it cannot be cut into stages here")


def _with_stream(args: Args, kwargs: Kwargs, stream: Tensor) -> tuple[Args, Kwargs]:
    """Put the stream in the place of a block's first tensor argument."""
    old = _stream(args, kwargs)
    new_args = tuple(stream if value is old else value for value in args)
    return new_args, {k: stream if v is old else v for k, v in kwargs.items()}


def _tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _first_tensor(output: Tree) -> Tensor:
    """Return the stream in what the last block returns."""
    return output if isinstance(output, Tensor) else _tensors(output)[0]


def _with_tensors(tree: Tree, new: Mapping[int, Tensor]) -> Tree:
    """Put tensors in the place of some of a tree's tensors, by their position among these."""
    leaves, structure = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for index, tensor in new.items():
        leaves[places[index]] = tensor
    return tree_unflatten(leaves, structure)


class _Alias(torch.autograd.Function):
    """The same memory as a tensor of its own: no view, and no leaf that torch uses every step.

    FSDP2 leaves hooks on what modules return: on a leaf they would add up, and a change of a view
    in place would drop them.
    """

    @staticmethod
    def forward(_: object, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad


def _alias(tensor: Tensor) -> Tensor:
    aliased: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return aliased


def _without_view(tensor: Tensor) -> Tensor:
    is_plain = not isinstance(tensor, DTensor)
    return _alias(tensor) if is_plain and tensor._is_view() else tensor


class _StreamEnd(Exception):  # noqa: N818 - no error: it ends the forward of a stage
    """Carries the stream out of the user's forward at the end of a stage."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class _StandIn(nn.Module):
    """Takes the place of a module that another stage holds.

    It keeps type, methods, attributes and submodules, which the model's code may look at; zeros
    that take no memory stand for the parameters.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        known = set(self.__dict__)
        plain = {k: v for k, v in original.__dict__.items() if k not in known and k != "forward"}
        self.__dict__.update(plain)
        self.__dict__.update(_hollow(original))
        name = type(self).__name__ + type(original).__name__
        self.__class__ = type(name, (type(self), type(original)), {})


def _hollow(module: nn.Module) -> dict[str, Any]:
    """Return parameters, buffers and submodules of a copy that has zeros for its parameters."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    zeros = {name: _zeros(parameter, torch.device("cpu")) for name, parameter in own.items()}
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else type(child).__new__(type(child))
        if child is not None:
            children[name].__dict__.update({**child.__dict__, **_hollow(child)})
    return {
        "_parameters": {},
        "_buffers": {**module._buffers, **zeros},
        "_non_persistent_buffers_set": {*module._non_persistent_buffers_set, *zeros},
        "_modules": children,
    }


class _StoppingBlock(_StandIn):
    """The first block of the next stage: ends this stage's forward with the stream."""

    def forward(self, *args: Tree, **kwargs: Tree) -> NoReturn:
        raise _StreamEnd(_stream(args, kwargs))


class _AbsentModule(_StandIn):
    """A module of a later stage."""

    def forward(self, *_args: Tree, **_kwargs: Tree) -> NoReturn:
        raise RuntimeError("a module of a later pipeline stage was called: the cut is not legal")


class _EarlierModule(_StandIn):
    """A block or another module of an earlier stage: returns zeros of what it returned there.

    The zeros take no memory (they are expanded from one element), unless the model writes into
    them. What the module hands on unchanged (a mask, say) is handed on here too.
    """

    def __init__(self, original: nn.Module, calls: Sequence[Call]) -> None:
        super().__init__(original)
        self._calls = calls
        self._next_call = 0
        self._zeros: dict[Sketch, Tensor] = {}
        self.allocate(torch.device("cpu"))

    def allocate(self, device: torch.device) -> None:
        """Make the zeros, one tensor for each that the module returned."""
        for call in self._calls:
            for sketch in _sketches(call):
                self._zeros[sketch] = _zeros(sketch, device)

    def restart(self) -> None:
        """Begin a forward of the model."""
        self._next_call = 0

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        call = self._calls[self._next_call]
        self._next_call += 1
        tensors = _tensors((args, kwargs)) if call.arguments else ()
        handed_on = dict(zip(call.arguments, tensors, strict=True))

        def returned(sketch: Sketch) -> Tensor:
            if sketch in handed_on:
                return handed_on[sketch]
            zeros = self._zeros[sketch]
            return torch.zeros_like(zeros).contiguous() if sketch.is_changed else zeros

        return tree_map_only(Sketch, returned, call.output)


def _zeros(like: Tensor | Sketch, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)


class Stage(nn.Module):
    """The units of one pipeline stage: takes what it receives, returns what it sends or the loss.

    Sent and received is the stream, and beside it the outputs that the receiving stage's spec
    names.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        user: UserModel,
        specs: Sequence[StageSpec],
        index: int,
    ) -> None:
        """Cut the stage out of a copy of the model that shares its parameters.

        The whole model can be dropped once all stages of the rank are made.

        Raises:
            ValueError: The spec names an output that does not exist, or that this stage can
                neither make nor pass on.
        """
        super().__init__()
        shared: dict[int, Any] = {id(t): t for t in model.parameters()}
        shared |= {id(t): t for t in model.buffers()}
        self.model = copy.deepcopy(model, shared)
        self.index = index
        self.device = torch.device("cpu")
        self.is_first = index == 0
        self.is_last = index == len(specs) - 1
        self.spec = specs[index]
        self.sends = () if self.is_last else specs[index + 1].receives
        self.user = user
        self.anatomy = anatomy
        self.sequence_modules: list[nn.Module] = []
        self.fused_modules: dict[str, int] = {}
        self.after_blocks: Callable[..., Tree] | None = None
        self.units = stage_units(specs, index, len(anatomy.blocks))
        self.stays_sharded = False
        self._received: tuple[Tensor, ...] = ()
        self._places = {anatomy.sketch(o): i for i, o in enumerate(self.spec.receives, 1)}
        self._carried: dict[Output, Tensor] | None = None
        self._replace_outer_modules()
        self._replace_blocks()
        self._earlier = [m for m in self.model.modules() if isinstance(m, _EarlierModule)]
        if not self.is_first:
            self._place_received()
        for output in self.sends:
            self._check_sent(output)

    def block_items(self) -> list[tuple[int, str, nn.Module]]:
        """Return position, path and module of the blocks that this stage runs."""
        spec = self.spec
        paths = self.anatomy.blocks[spec.first_block : spec.end_block]
        return [
            (spec.first_block + i, path, self.model.get_submodule(path))
            for i, path in enumerate(paths)
        ]

    def forward(
        self, *received: Tensor, inputs: Tree, targets: Tree
    ) -> Tensor | tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            received: What the previous stage sent, nothing on the first.
            inputs: The model's own inputs: every stage runs the code around its units.
            targets: Targets, used on the last stage.

        Returns:
            What the next stage receives, or on the last stage the scalar loss.
        """
        self._received = tuple(_alias(tensor) for tensor in received)
        self._carried = {}
        for module in self._earlier:
            module.restart()
        try:
            output = run_model(self.model, inputs)
        except _StreamEnd as end:
            sent = [end.stream, *(self._sent(name) for name in self.sends)]
            whole = tuple(_without_view(tensor.contiguous()) for tensor in sent)
            return whole if self.sends else whole[0]
        finally:
            self._received = ()
            self._carried = None
        return self.user.loss(output, targets)

    @property
    def has_parameters(self) -> bool:
        """Whether there is anything to optimise: a stage may hold an activation or a loss alone."""
        return any(True for _ in self.parameters())

    def move_to(self, device: torch.device) -> None:
        """Move parameters and buffers to the device; what is on meta stays there for now."""
        self.device = device
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_meta:
                    parameter.data = parameter.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    expanded = not any(buffer.stride()) and buffer.numel() > 1
                    moved = _zeros(buffer, device) if expanded else buffer.to(device)
                    module._buffers[name] = moved
        for module in self._earlier:
            module.allocate(device)

    def _replace_blocks(self) -> None:
        spec, anatomy = self.spec, self.anatomy
        for i, path in enumerate(anatomy.blocks):
            block = self.model.get_submodule(path)
            if i < spec.first_block:
                _replace(self.model, path, _EarlierModule(block, anatomy.calls[path]))
            elif i >= spec.end_block and not self.is_last:
                stand_in = _StoppingBlock if i == spec.end_block else _AbsentModule
                _replace(self.model, path, stand_in(block))

    def _place_received(self) -> None:
        """Let the first block take the stream, and earlier modules return what is received."""
        spec, anatomy = self.spec, self.anatomy
        stream_output = spec.stream_output
        if spec.first_block < spec.end_block:
            first = self.model.get_submodule(anatomy.blocks[spec.first_block])
            first.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        else:  # the epilogue alone reads what the last block returned
            stream_output = (anatomy.blocks[-1], 0)
        if stream_output is not None:
            self._places[anatomy.sketch(stream_output)] = 0
        modules = dict(self.model.named_modules())
        for path, calls in anatomy.calls.items():
            if len(calls) > 1 or calls[0].unit >= self.units.start or path not in modules:
                continue
            # A tensor that several modules return (one hands on what it got) is placed in each.
            returned = {i: s for i, s in enumerate(_sketches(calls[0])) if s in self._places}
            if returned:
                hook = functools.partial(self._return_received, returned)
                modules[path].register_forward_hook(hook)

    def _check_sent(self, output: Output) -> None:
        """Check that the stage makes an output itself or gets it from the previous stage.

        Raises:
            ValueError: It does neither.
        """
        received = self.anatomy.sketch(output) in self._places
        if not received and self.anatomy.call(output).unit not in self.units:
            raise ValueError(
                f"STAGES does not fit the model: stage {self.index + 1} receives output "
                f"{output[1]} of {output[0]}, which stage {self.index} does not have"
            )

    def register_late_hooks(self) -> None:
        """Register what looks at outputs of modules, after the hooks that FSDP2 put on them.

        There outputs are kept that the next stage receives, there the forward ends where that
        stage holds the epilogue alone, and there the stream is gathered under sequence parallelism.
        """
        for output in self.sends:
            if self.anatomy.sketch(output) not in self._places:
                module = self.model.get_submodule(output[0])
                module.register_forward_hook(functools.partial(self._keep_output, output))
        blocks = self.anatomy.blocks
        if not self.is_last and self.spec.end_block == len(blocks):
            self.model.get_submodule(blocks[-1]).register_forward_hook(self._stop_with_output)
        if self.is_last and self.after_blocks is not None:
            self.model.get_submodule(blocks[-1]).register_forward_hook(self.after_blocks)

    def prepare_backward(self, *, is_last: bool) -> None:
        """Tell FSDP2 what a microbatch does with gradients and parameters; no pipeline.

        Under ZeRO-3 both lie sharded between microbatches: gradients are reduce-scattered and
        parameters gathered again in each. Else both stay whole until the last microbatch.
        Replicas add up their gradients in the last in any case.
        """
        # FSDP2 adds these methods to the class at run time, unseen by type checkers.
        sharded = is_last or self.stays_sharded
        self.set_requires_gradient_sync(sharded)  # type: ignore[operator]
        self.set_reshard_after_backward(sharded)  # type: ignore[operator]
        self.set_requires_all_reduce(is_last)  # type: ignore[operator]

    def _stop_with_output(self, _: nn.Module, __: Args, output: Tree) -> NoReturn:
        raise _StreamEnd(_first_tensor(output))

    def _enter_block(self, _: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return _with_stream(args, kwargs, self._received[0])

    def _return_received(
        self, returned: Mapping[int, Sketch], _: nn.Module, __: Args, output: Tree
    ) -> Tree:
        new = {}
        for index, sketch in returned.items():
            tensor = self._received[self._places[sketch]]
            new[index] = tensor.clone() if sketch.is_changed else tensor
        return _with_tensors(output, new)

    def _keep_output(self, name: Output, _: nn.Module, __: Args, output: Tree) -> None:
        if self._carried is not None:  # else backward runs it again
            tensor = _tensors(output)[name[1]]
            changes = self.anatomy.sketch(name).is_changed
            self._carried[name] = tensor.clone() if changes else tensor

    def _sent(self, name: Output) -> Tensor:
        """Return an output that the next stage receives: made here, or passed on."""
        assert self._carried is not None
        place = self._places.get(self.anatomy.sketch(name))
        tensor = self._carried[name] if place is None else self._received[place]
        # What modules under tensor parallelism return may still be split.
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _uses(self, name: str) -> bool:
        """Say whether units of this stage use the parameter of that name."""
        users = self.anatomy.users[self.anatomy.first_names[name]]
        return not users.isdisjoint(self.units)

    def _calls(self, path: str) -> bool:
        """Say whether units of this stage call the outer module of that path."""
        return not self.anatomy.runs.get(path, frozenset()).isdisjoint(self.units)

    def _needs(self, name: str) -> bool:
        """Say whether a parameter must be kept though this stage does not call its module.

        That is so where it is used directly, and not through a tied name of a module that runs.
        """
        names = self.anatomy.first_names
        tied = (other for other, first in names.items() if first == names[name])
        return self._uses(name) and not any(self._calls(n.rpartition(".")[0]) for n in tied)

    def _replace_outer_modules(self) -> None:
        """Put stand-ins for modules outside the blocks that other stages run."""
        replaced: list[str] = []
        for path, module in list(outer_modules(self.model, self.anatomy.blocks)):
            runs = self.anatomy.runs[path]
            names = [f"{path}.{name}" for name, _ in module.named_parameters()]
            below = any(path.startswith(f"{outer}.") for outer in replaced)
            if below or not names or not runs or self._calls(path):
                continue
            own = module.named_parameters(recurse=False)
            kept = {name: p for name, p in own if self._needs(f"{path}.{name}")}
            if any(self._needs(name) for name in names if name.count(".") > path.count(".") + 1):
                continue
            if min(runs) >= self.units.stop:
                stand_in: nn.Module = _AbsentModule(module)
            else:
                stand_in = _EarlierModule(module, self.anatomy.calls.get(path, ()))
            for name, parameter in kept.items():
                del stand_in._buffers[name]
                stand_in.register_parameter(name, parameter)
            _replace(self.model, path, stand_in)
            replaced.append(path)
        self._drop_single_parameters()

    def _drop_single_parameters(self) -> None:
        """Replace single parameters (the root's own, say) that no unit of this stage uses."""
        blocks = self.anatomy.blocks
        for path, module in self.model.named_modules():
            if _lies_in_any(path, blocks):
                continue
            for name, parameter in list(module._parameters.items()):
                if parameter is None or self._uses(f"{path}.{name}" if path else name):
                    continue
                del module._parameters[name]
                zeros = _zeros(parameter, torch.device("cpu"))
                module.register_buffer(name, zeros, persistent=False)


def stages_of_rank(specs: Sequence[StageSpec], mesh: DeviceMesh) -> list[int]:
    """Return the positions of this rank's stages."""
    pp_rank = mesh["pp"].get_local_rank() if "pp" in _axes(mesh) else 0
    return [index for index, spec in enumerate(specs) if spec.pp_rank == pp_rank]


def stage_units(specs: Sequence[StageSpec], index: int, num_blocks: int) -> range:
    """Return the units of a stage; the prologue is unit 0, block i is unit i + 1."""
    first = 0 if index == 0 else specs[index].first_block + 1
    end = num_blocks + 2 if index == len(specs) - 1 else specs[index].end_block + 1
    return range(first, end)


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module of that path under all of its names."""
    old = root.get_submodule(path)
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = module


# ---------------------------------------------------------------------------------------------
# 4. Tensor parallelism
#
# Inside a sharded region activations are DTensors, so that the user's views see global shapes;
# between regions the stream is a plain local tensor: whole on each rank, or under sequence
# parallelism the rank's part of the sequence.
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModuleSharding:
    """How one module that owns parameters runs; layouts are spelled as torch spells them."""

    module: str
    """Path in its block, or in the model for modules outside the blocks."""
    style: str
    """"column", "row", "vocab_embedding", "replicate" or "sequence" (whole parameters on the
    rank's part of the sequence)."""
    input_layout: str = "Replicate"
    """Layout that the first input must have."""
    output_layout: str = "Replicate"
    """Layout that the output leaves with."""
    output_is_local: bool = True
    """The output goes on as a plain local tensor, else as a DTensor."""
    fused: int = 1
    """Equal projections held in one weight along the output features."""


def placement(layout: str) -> Placement:
    """Read "Replicate" or "Shard(dim)".

    Raises:
        ValueError: Another text.
    """
    if layout == "Replicate":
        return Replicate()
    if layout.startswith("Shard(") and layout.endswith(")"):
        return Shard(int(layout[len("Shard(") : -1]))
    raise ValueError(f"{layout!r} is no layout: write Replicate or Shard(dim)")


@dataclass(slots=True)
class TensorParallel:
    """Applies shardings to the modules of one stage."""

    stage: Stage
    """What is sharded, in place."""
    mesh: DeviceMesh
    """The tp axis."""
    sequence_dim: int | None
    """Dim of the stream that is split between regions of blocks, None where it is whole."""
    _made: dict[int, nn.Parameter] = field(default_factory=dict)
    """New parameter by the old one's id: tied parameters stay tied."""

    def apply(
        self,
        block_shardings: Sequence[tuple[Sequence[int], Sequence[ModuleSharding]]],
        outer_shardings: Sequence[ModuleSharding],
    ) -> None:
        """Shard this stage's blocks and outer modules, and split the stream between them.

        Args:
            block_shardings: Positions of blocks and what holds for each of them.
            outer_shardings: What holds for modules outside the blocks.
        """
        install_dtensor_rules()
        inside = Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)
        by_block = {block: mods for blocks, mods in block_shardings for block in blocks}
        for index, _, block in self.stage.block_items():
            shardings = list(by_block.get(index, ()))
            for sharding in shardings:
                self._shard(block.get_submodule(sharding.module), sharding, inside)
            if self.sequence_dim is not None:
                shardings += self._replicate_others(block, inside)
                self._check_sequence_block(block, self.stage.anatomy.blocks[index])
                self._gather_at_regions(block, shardings)
        for sharding in outer_shardings:
            module = self.stage.model.get_submodule(sharding.module)
            if not isinstance(module, _StandIn) and module._parameters:
                self._shard(module, sharding, Replicate())
        self._tie_containers()
        self._check_ties()
        self._made.clear()  # FSDP2 keeps its own shards: these would live on beside them
        if self.sequence_dim is not None:
            self._split_stream()
        for path, module in self.stage.model.named_modules():
            if hasattr(module, "weight_0"):
                self.stage.fused_modules[path] = sum(
                    name.startswith("weight_") for name in module._parameters
                )

    def _shard(self, module: nn.Module, sharding: ModuleSharding, stream: Placement) -> None:
        if sharding.style == "sequence":
            self.stage.sequence_modules.append(module)
        elif sharding.style == "column" and sharding.fused > 1:
            self._shard_fused(_linear(module, sharding), sharding, stream)
        elif sharding.style in ("column", "row", "vocab_embedding", "replicate"):
            for name, shard in _parameter_placements(module, sharding).items():
                parameter = module._parameters[name]
                assert parameter is not None
                module._parameters[name] = self._distribute(parameter, shard)
            features = module.in_features if isinstance(module, nn.Linear) else None
            whole = features if sharding.style == "row" else None
            edge = _Edge(self.mesh, sharding, stream, whole)
            module.register_forward_pre_hook(edge.enter)
            module.register_forward_hook(edge.leave)
        else:
            raise ValueError(f"{sharding.module}: unknown style {sharding.style!r}")

    def _distribute(self, parameter: nn.Parameter, shard: Placement) -> nn.Parameter:
        made = self._made.get(id(parameter))
        if made is None:
            local = distribute_tensor(parameter.detach(), self.mesh, [shard], src_data_rank=None)
            made = nn.Parameter(local, requires_grad=parameter.requires_grad)
            self._made[id(parameter)] = self._made[id(made)] = made
        return made

    def _shard_fused(self, module: nn.Linear, sharding: ModuleSharding, stream: Placement) -> None:
        """Hold n fused projections as n parameters, so that each is split by itself.

        The output is their concatenation, labelled such that a split along it stays local.
        """
        count, edge = sharding.fused, _Edge(self.mesh, sharding, stream, None)
        for name in ("weight", "bias"):
            fused = module._parameters.pop(name, None)
            for i, part in enumerate(() if fused is None else fused.detach().chunk(count, 0)):
                local = distribute_tensor(part, self.mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(f"{name}_{i}", nn.Parameter(local))

        def forward(x: Tensor) -> Tensor:
            outputs = [
                nn.functional.linear(x, getattr(module, f"weight_{i}"), _optional(module, i))
                for i in range(count)
            ]
            if sharding.output_layout == "Replicate":
                outputs = [edge.to_layout(output) for output in outputs]
            return torch.cat(outputs, -1)

        module.forward = forward  # type: ignore[method-assign, assignment]
        module.register_forward_pre_hook(edge.enter)
        module.register_forward_hook(edge.leave)

    def _replicate_others(self, block: nn.Module, stream: Placement) -> list[ModuleSharding]:
        """Run modules without an instruction whole, on the gathered stream."""
        made = []
        for path, module in block.named_modules():
            plain = [p for p in module._parameters.values() if p is not None]
            if not path or not plain or module in self.stage.sequence_modules:
                continue
            if any(not isinstance(parameter, DTensor) for parameter in plain):
                made.append(ModuleSharding(path, "replicate", output_is_local=False))
                self._shard(module, made[-1], stream)
        return made

    def _check_sequence_block(self, block: nn.Module, path: str) -> None:
        """Refuse whole parameters that would see a part of the sequence only.

        Raises:
            ValueError: A parameter is neither sharded nor listed as "sequence".
        """
        known = {id(p) for m in self.stage.sequence_modules for p in m.parameters()}
        for name, parameter in block.named_parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in known:
                raise ValueError(
                    f"{path}.{name} runs on a part of the sequence, so its gradient must be "
                    "summed over tp: give its module the style 'sequence'"
                )

    def _gather_at_regions(self, block: nn.Module, shardings: Sequence[ModuleSharding]) -> None:
        """Gather the sequence where a sharded region begins, not at its first projection.

        A region is the largest submodule of the block whose parameters are all DTensors. Its own
        code (views of the input's shape) then sees the whole sequence.

        Raises:
            ValueError: A projection whose output is reshaped lies in no such submodule.
        """
        regions: dict[str, ModuleSharding] = {}
        for sharding in shardings:
            if sharding.style not in ("column", "replicate"):
                continue
            paths = [sharding.module]
            while "." in paths[-1]:
                paths.append(paths[-1].rpartition(".")[0])
            inside = [path for path in paths[1:] if _is_sharded(block.get_submodule(path))]
            if inside:
                regions.setdefault(inside[-1], sharding)
            elif sharding.style == "column" and not sharding.output_is_local:
                raise ValueError(
                    f"{sharding.module} is reshaped by code that also sees a part of the "
                    "sequence only: plan without sequence parallelism"
                )
        for path, sharding in regions.items():
            stream = Shard(self.sequence_dim or 0)
            edge = _Edge(self.mesh, sharding, stream, None)
            block.get_submodule(path).register_forward_pre_hook(edge.enter_region, with_kwargs=True)

    def _tie_containers(self) -> None:
        """Give a sharded parameter to a module around the one that runs with it.

        A head's bias, say, that its container registers under a name of its own.
        """
        names = self.stage.anatomy.first_names
        for name, parameter in list(self.stage.model.named_parameters(remove_duplicate=False)):
            path, _, last = name.rpartition(".")
            made = self._made.get(id(parameter), parameter)
            inner = (
                n for n in names if n.startswith(f"{path}.") and n.count(".") > name.count(".")
            )
            if made is not parameter and any(names[n] == names[name] for n in inner):
                self.stage.model.get_submodule(path)._parameters[last] = made

    def _check_ties(self) -> None:
        """Check that tied parameters still are one parameter.

        Raises:
            ValueError: The names of one parameter were sharded in different ways.
        """
        seen: dict[str, nn.Parameter] = {}
        for name, parameter in self.stage.model.named_parameters(remove_duplicate=False):
            first = self.stage.anatomy.first_names.get(name, name)
            if seen.setdefault(first, parameter) is not parameter:
                raise ValueError(
                    f"{name} and {first} are one parameter, but are sharded in different ways: "
                    "give both modules the same split of their weight"
                )

    def _split_stream(self) -> None:
        """Scatter the stream where it enters the first block, gather it after the last."""
        assert self.sequence_dim is not None
        blocks, shard = self.stage.anatomy.blocks, Shard(self.sequence_dim)
        change = functools.partial(_relayout, mesh=self.mesh)

        def scatter(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            stream = change(_stream(args, kwargs), old=Replicate(), new=shard)
            return _with_stream(args, kwargs, stream)

        def gather(_: nn.Module, __: Args, output: Tree) -> Tree:
            whole = change(_first_tensor(output), old=shard, new=Replicate())
            return _with_tensors(output, {0: whole})

        if self.stage.is_first:
            first = self.stage.model.get_submodule(blocks[0])
            first.register_forward_pre_hook(scatter, with_kwargs=True)
        self.stage.after_blocks = gather


def _relayout(stream: Tensor, *, mesh: DeviceMesh, old: Placement, new: Placement) -> Tensor:
    """Change the layout of a local tensor; backward makes the opposite change."""
    distributed = DTensor.from_local(stream, mesh, [old], run_check=False)
    local: Tensor = distributed.redistribute(placements=[new]).to_local()
    return local


def _is_sharded(module: nn.Module) -> bool:
    """Say whether all parameters of a module are DTensors."""
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def _linear(module: nn.Module, sharding: ModuleSharding) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(
            f"{sharding.module} is a {type(module).__name__}: only nn.Linear can be split by "
            f"style {sharding.style!r}"
        )
    return module


def _optional(module: nn.Module, index: int) -> Tensor | None:
    return module._parameters.get(f"bias_{index}")


def _parameter_placements(module: nn.Module, sharding: ModuleSharding) -> dict[str, Placement]:
    """Return the placement of each of a module's own parameters.

    Raises:
        TypeError: The style is not for this kind of module.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if sharding.style == "replicate":
        return {name: Replicate() for name in names}
    if sharding.style == "vocab_embedding":
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"{sharding.module} is a {type(module).__name__}, no nn.Embedding")
        return {"weight": Shard(0)}
    _linear(module, sharding)
    if sharding.style == "column":
        return {name: Shard(0) for name in names}
    return {name: Shard(1) if name == "weight" else Replicate() for name in names}


def _redistribute(x: DTensor, wanted: Placement) -> DTensor:
    """Change the layout, or do nothing: even an idle change would reduce gradients at once."""
    if isinstance(wanted, Shard) and wanted.dim < 0:
        wanted = Shard(wanted.dim % x.ndim)
    return x if x.placements == (wanted,) else x.redistribute(placements=[wanted])


@dataclass(frozen=True, slots=True)
class _Edge:
    """Layout changes where a sharded region begins and ends."""

    mesh: DeviceMesh
    sharding: ModuleSharding
    stream: Placement
    """Layout of a plain local input that is the stream."""
    whole_features: int | None
    """Input features of a row-split linear: a plain input with fewer is a shard of them."""

    def enter(self, _: nn.Module, args: Args) -> Args:
        """Make the first argument a DTensor in the input layout."""
        x = args[0]
        wanted = placement(self.sharding.input_layout)
        if isinstance(x, DTensor):
            return (_redistribute(x, wanted), *args[1:])
        if self.whole_features is not None and x.shape[-1] != self.whole_features:
            return (DTensor.from_local(x, self.mesh, [wanted], run_check=False), *args[1:])
        return (self._shared_view(x, wanted), *args[1:])

    def enter_region(self, _: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Make the stream among the arguments a DTensor in the input layout."""
        stream, wanted = _stream(args, kwargs), placement(self.sharding.input_layout)
        if isinstance(stream, DTensor):  # from a module that ran whole before the region
            return _with_stream(args, kwargs, _redistribute(stream, wanted))
        return _with_stream(args, kwargs, self._shared_view(stream, wanted))

    def _shared_view(self, x: Tensor, wanted: Placement) -> DTensor:
        """Return the DTensor of a stream tensor, one for all modules that read it.

        So q, k and v (gate and up) share one collective forward and one backward.
        """
        key = (x._version, str(wanted), torch.is_grad_enabled())
        kept = x.__dict__.get("_tensor_parallel_view")
        if kept is not None and kept[0] == key:
            shared: DTensor = kept[1]
            return shared
        # Of an alias: a view of x, which x holds here, would keep x alive for ever.
        view = DTensor.from_local(_alias(x), self.mesh, [self.stream], run_check=False)
        view = _redistribute(view, wanted)
        x.__dict__["_tensor_parallel_view"] = (key, view)
        return view

    def to_layout(self, output: Tensor) -> Tensor:
        """Change the output's layout."""
        assert isinstance(output, DTensor)
        return _redistribute(output, placement(self.sharding.output_layout))

    def leave(self, _: nn.Module, __: Args, output: DTensor) -> Tensor:
        """Bring the output into its layout, as a local tensor where it goes on as one."""
        result = output if self.sharding.fused > 1 else self.to_layout(output)
        return result.to_local() if self.sharding.output_is_local else result  # type: ignore


# -- torch's own internals that DTensor regions need: the only private names of this file --------

_aten = torch.ops.aten


def install_dtensor_rules() -> None:
    """Teach DTensor what it lacks: attention on the CPU, fused projections, strided views."""
    if _aten.cat.default in _handlers():
        return
    _install_cpu_attention()
    handlers = _handlers()
    handlers[_aten.cat.default] = _cat_parts
    handlers[_aten.split.Tensor] = handlers[_aten.split_with_sizes.default] = _split_parts
    handlers[_aten.slice.Tensor] = _slice_parts
    handlers[_aten.view.default] = handlers[_aten._unsafe_view.default] = _view_or_copy


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _without_handler(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    handlers = _handlers()
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _install_cpu_attention() -> None:
    """Register shardings of CPU attention: over heads, over samples, or none."""

    def mask_placement(mask: Tree, kept: Placement) -> list[Placement | None]:
        if mask is None:
            return []
        dim = kept.dim if isinstance(kept, Shard) else None
        splits = dim is not None and len(mask.shape) == 4 and mask.shape[dim] != 1
        return [kept if splits else Replicate()]

    # Arguments before the mask: q, k, v, dropout, causal; and in backward the gradient, q, k, v,
    # output, logsumexp, dropout, causal. Each list is outputs, then inputs.
    kept_dims: tuple[Placement, ...] = (Replicate(), Shard(1), Shard(0))

    def forward_rule(*_args: Tree, attn_mask: Tree = None, **_kwargs: Tree) -> list[Tree]:
        return [
            ([kept] * 2, [kept] * 3 + [None] * 2 + mask_placement(attn_mask, kept))
            for kept in kept_dims
        ]

    def backward_rule(*_args: Tree, attn_mask: Tree = None, **_kwargs: Tree) -> list[Tree]:
        return [
            ([kept] * 3, [kept] * 6 + [None] * 2 + mask_placement(attn_mask, kept))
            for kept in kept_dims
        ]

    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(forward_rule)
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    register_sharding(backward)(backward_rule)


def _wrap_local(
    local: Tensor, like: DTensor, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """Make a DTensor of a local tensor with contiguous global strides, outside autograd."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    meta = TensorMeta(torch.Size(shape), tuple(reversed(strides)), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[no-untyped-call]


def _parts_axis(x: DTensor, dim: int) -> tuple[int, int] | None:
    """Return mesh dim and number of parts where ``x`` is a concatenation of split parts."""
    for axis, kept in enumerate(x.placements):
        if isinstance(kept, _StridedShard) and kept.dim == dim:
            return axis, int(kept.split_factor)
    return None


def _cat_parts(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Concatenate parts that are split alike along the concatenated dim without communication."""
    parts = args[0]
    if not all(isinstance(part, DTensor) for part in parts) or len(parts) < 2:
        return _without_handler(op, args, kwargs)
    first = parts[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % first.ndim
    alike = all(p.placements == first.placements and p.shape == first.shape for p in parts)
    for axis, kept in enumerate(first.placements):
        even = first.shape[dim] % first.device_mesh.size(axis) == 0
        if alike and even and type(kept) is Shard and kept.dim == dim:
            local = torch.cat([part._local_tensor for part in parts], dim)
            placements = list(first.placements)
            placements[axis] = _StridedShard(dim, split_factor=len(parts))
            shape = list(first.shape)
            shape[dim] *= len(parts)
            return _wrap_local(local, first, placements, shape)
    return _without_handler(op, args, kwargs)


def _split_parts(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Split a concatenation of split parts into the parts, as local views."""
    x, sizes = args[0], args[1]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.ndim
    parts = _parts_axis(x, dim)
    if parts is not None:
        axis, count = parts
        size = x.shape[dim] // count
        expected = size if isinstance(sizes, int) else [size] * count
        if (sizes if isinstance(sizes, int) else list(sizes)) == expected:
            return [_part(x, axis, dim, count, index) for index in range(count)]
    return _without_handler(op, args, kwargs)


def _slice_parts(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """Take one part out of a concatenation of split parts, as a local view."""
    x, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].ndim
    parts = _parts_axis(x, dim)
    if parts is not None:
        axis, count = parts
        size = x.shape[dim] // count
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        end = args[3] if len(args) > 3 and args[3] is not None else x.shape[dim]
        step = args[4] if len(args) > 4 else 1
        if step == 1 and start % size == 0 and min(end, x.shape[dim]) - start == size:
            return _part(x, axis, dim, count, start // size)
    return _without_handler(op, args, kwargs)


def _part(x: DTensor, axis: int, dim: int, count: int, index: int) -> DTensor:
    size = x._local_tensor.shape[dim] // count
    local = x._local_tensor.narrow(dim, index * size, size)
    placements = list(x.placements)
    placements[axis] = Shard(dim)
    shape = list(x.shape)
    shape[dim] //= count
    return _wrap_local(local, x, placements, shape)


def _view_or_copy(op: Function, args: Args, kwargs: Kwargs) -> Tree:
    """View; copy first where the local strides differ from the global ones and forbid it."""
    try:
        return _without_handler(op, args, kwargs)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        x = args[0]
        copied = _wrap_local(x._local_tensor.contiguous(), x, x.placements, x.shape)
        return _without_handler(op, (copied, *args[1:]), kwargs)


# ---------------------------------------------------------------------------------------------
# 5. Recomputation and parameter sharding
# ---------------------------------------------------------------------------------------------

SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""What selective recomputation keeps: outputs of matrix products, convolutions and attention."""


def _selective_policy(_: object, op: Function, *_args: Tree, **_kwargs: Tree) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_activations(stage: Stage) -> None:
    """Recompute blocks in backward as the stage's spec says.

    Raises:
        ValueError: An unknown word in the spec.
    """
    if not stage.spec.recompute:
        return
    contexts = functools.partial(create_selective_checkpoint_contexts, _selective_policy)
    options: dict[str, dict[str, Any]] = {"full": {}, "selective": {"context_fn": contexts}}
    for (_, path, block), mode in zip(stage.block_items(), stage.spec.recompute, strict=True):
        if mode == "none":
            continue
        if mode not in options:
            raise ValueError(f"{path}: {mode!r} is not one of none, selective, full")
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, **options[mode]
        )


def shard_parameters(
    stage: Stage, mesh: DeviceMesh, options: Options, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to each block and then to the rest of the stage, also where dp is 1.

    So parameters are DTensors in every layout. The rest (prologue, epilogue) stays gathered
    between forward and backward: it would be gathered again at once.
    """
    replicated = "dp_replicate" in _axes(mesh)
    dp_mesh = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    mixed = options.dtype is not options.master_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=options.dtype if mixed else None,
        reduce_dtype=options.master_dtype if mixed else None,
        cast_forward_inputs=False,  # rotary tables and the like keep their precision
    )
    for _, _, block in stage.block_items():
        if any(True for _ in block.parameters()):
            block.register_forward_hook(_return_no_views)
            fully_shard(
                block,
                mesh=dp_mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=policy,
            )
    fully_shard(stage, mesh=dp_mesh, reshard_after_forward=False, mp_policy=policy)
    stage.stays_sharded = reshard_after_forward
    stage.register_late_hooks()


def _return_no_views(_: nn.Module, __: Args, output: Tree) -> Tree:
    if any(tensor._is_view() for tensor in _tensors(output)):
        output = tree_map_only(Tensor, _without_view, output)
    return output


def materialise(stage: Stage, device: torch.device) -> None:
    """Allocate parameters that are still on the meta device; buffers keep their values."""
    if not any(parameter.is_meta for parameter in stage.parameters()):
        return
    buffers = [
        (module, name, buffer)
        for module in stage.modules()
        for name, buffer in module._buffers.items()
    ]
    stage.to_empty(device=device)
    for module, name, buffer in buffers:
        module._buffers[name] = None if buffer is None else buffer.to(device)


# ---------------------------------------------------------------------------------------------
# 6. Running the microbatches of a step
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Runner:
    """Runs forward and backward of all microbatches of a step on this rank's stages."""

    stages: Sequence[Stage]
    """Stages of this rank in model order."""
    num_microbatches: int
    """Microbatches per step."""
    mesh: DeviceMesh
    """The whole mesh."""
    splits_vocabulary: bool
    """The last stage's logits are split over the vocabulary."""
    schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None
    """Pipeline schedule, None without pipeline."""

    def run(self, inputs: Tree, targets: Tree) -> Tensor:
        """Accumulate the gradients of the mean loss of this rank's samples.

        Returns:
            Mean loss of the step over all data-parallel ranks, the same on every rank.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(implicit_replication())  # masks, rotary tables in DTensor regions
            if self.splits_vocabulary:
                stack.enter_context(loss_parallel())
            losses = self._run(inputs, targets)
        loss = torch.zeros((), dtype=torch.float64, device=self.stages[0].device)
        if losses:
            loss += torch.stack([value.detach() for value in losses]).double().mean()
        dist.all_reduce(loss)
        pp_size = self.mesh["pp"].size() if "pp" in _axes(self.mesh) else 1
        return loss / (self.mesh.size() // pp_size)

    def _run(self, inputs: Tree, targets: Tree) -> list[Tensor]:
        losses: list[Tensor] = []
        if self.schedule is not None:
            first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
            self.schedule.step(
                inputs=inputs, targets=targets, target=first, losses=losses, return_outputs=False
            )
            return losses
        (stage,) = self.stages
        for microbatch in split_microbatches((inputs, targets), self.num_microbatches):
            is_last = len(losses) == self.num_microbatches - 1
            stage.prepare_backward(is_last=is_last)
            loss = stage(inputs=microbatch[0], targets=microbatch[1])
            torch.autograd.backward(loss / self.num_microbatches)
            losses.append(loss.detach())
        return losses


def split_microbatches(batch: Tree, count: int) -> Iterator[Tree]:
    """Yield ``count`` equal pieces of every tensor of a batch."""
    leaf = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    size = leaf.shape[0] // count
    for index in range(count):
        yield Batches.slice(batch, index * size, size)


def make_runner(
    stages: Sequence[Stage],
    mesh: DeviceMesh,
    schedule: str,
    num_microbatches: int,
    *,
    sequence_dim: int | None,
    splits_vocabulary: bool,
) -> Runner:
    """Make the runner; with a pp axis it runs the schedule of that name."""
    runner = Runner(
        stages=stages,
        num_microbatches=num_microbatches,
        mesh=mesh,
        splits_vocabulary=splits_vocabulary,
    )
    if "pp" not in _axes(mesh):
        return runner
    device, group = stages[0].device, mesh["pp"].get_group()
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the communicator
    num_stages = mesh["pp"].size() * len(stages)
    split = None if sequence_dim is None else (sequence_dim, mesh["tp"].size())
    made = [
        PipelineStage(
            stage,
            stage.index,
            num_stages,
            device,
            input_args=() if stage.is_first else _examples(stage, split, after=False),
            output_args=_examples(stage, split, after=True),
            group=group,
        )
        for stage in stages
    ]
    kind = get_schedule_class(schedule)

    def loss_of(output: Tensor, _: Tensor) -> Tensor:
        return output

    if issubclass(kind, PipelineScheduleMulti):
        runner.schedule = kind(made, num_microbatches, loss_fn=loss_of)
    else:
        assert issubclass(kind, PipelineScheduleSingle)
        runner.schedule = kind(made[0], num_microbatches, loss_fn=loss_of)
    return runner


def _examples(stage: Stage, split: tuple[int, int] | None, *, after: bool) -> tuple[Tensor, ...]:
    """Return meta tensors like what the stage receives or sends (its loss on the last).

    Those that no gradient flows through (a frozen embedding's output) say so, and torch's stages
    send none back for them.
    """
    anatomy = stage.anatomy
    if after and stage.is_last:
        dtype = torch.promote_types(anatomy.streams[-1].dtype, torch.float32)
        return (torch.empty((), dtype=dtype, device="meta", requires_grad=True),)
    stream = anatomy.streams[(stage.units.stop if after else stage.units.start) - 1].example()
    if split is not None:
        dim, count = split
        stream = stream.narrow(dim, 0, stream.shape[dim] // count).contiguous()
    carried = stage.sends if after else stage.spec.receives
    return (stream, *(anatomy.sketch(output).example() for output in carried))


def check_sequence(anatomy: Anatomy, mesh: DeviceMesh, sequence_dim: int | None) -> None:
    """Check that the stream flows from block to block and can be split evenly over tp.

    Raises:
        ValueError: It does not or cannot.
    """
    if sequence_dim is None:
        return
    for path, stream in zip(anatomy.blocks, anatomy.streams[1:], strict=True):
        if anatomy.sketch((path, 0)) is not stream:
            raise ValueError(
                f"sequence parallelism needs blocks that hand one tensor to the next, but {path} "
                "does not: set SEQUENCE_DIM to None"
            )
    tp_size = mesh["tp"].size()
    for stream in anatomy.streams:
        if stream.shape[sequence_dim] % tp_size:
            raise ValueError(
                f"sequence parallelism splits dim {sequence_dim} of {tuple(stream.shape)} over "
                f"{tp_size} ranks: the sequence length must be a multiple of {tp_size}"
            )


# ---------------------------------------------------------------------------------------------
# 7. Gradients: sums over tp and over stages, the global norm
# ---------------------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sum_sequence_gradients(stages: Sequence[Stage], mesh: DeviceMesh) -> None:
    """Sum over tp the gradients of modules that saw a part of the sequence only."""
    grads = [
        _local(parameter.grad)
        for stage in stages
        for module in stage.sequence_modules
        for parameter in module.parameters()
        if parameter.grad is not None
    ]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=mesh["tp"].get_group())
    sizes = [grad.numel() for grad in grads]
    for grad, summed in zip(grads, torch.split(flat, sizes), strict=True):
        grad.copy_(summed.view_as(grad))


class SharedParameters:
    """Parameters that several pipeline stages hold, such as a tied embedding and head."""

    def __init__(
        self, stages: Sequence[Stage], specs: Sequence[StageSpec], mesh: DeviceMesh
    ) -> None:
        """Find them; the same list is found on every rank."""
        self._group = mesh["pp"].get_group() if "pp" in _axes(mesh) else None
        self._rank = mesh["pp"].get_local_rank() if "pp" in _axes(mesh) else 0
        self._specs = specs
        self._holders: dict[str, list[int]] = {}
        anatomy = stages[0].anatomy
        units = [stage_units(specs, i, len(anatomy.blocks)) for i in range(len(specs))]
        for name, users in anatomy.users.items():
            holders = [i for i, held in enumerate(units) if not users.isdisjoint(held)]
            if len(holders) > 1:
                self._holders[name] = holders
        self._mine: dict[tuple[str, int], nn.Parameter] = {
            (name, stage.index): parameter
            for stage in stages
            for name, parameter in named_parameters(stage)
            if name in self._holders
        }
        self.copies = {
            id(parameter)
            for (name, index), parameter in self._mine.items()
            if index != self._holders[name][0]
        }
        """Ids of parameters that are counted on an earlier stage."""

    def sum_gradients(self) -> None:
        """Give every holder the sum of all holders' gradients, added in stage order."""
        for name, holders in self._holders.items():
            grads = {
                index: _local(parameter.grad)
                for (n, index), parameter in self._mine.items()
                if n == name and parameter.grad is not None
            }
            if not grads:
                continue
            received = self._exchange(holders, grads)
            total = functools.reduce(torch.add, (received[index] for index in holders))
            for grad in grads.values():
                grad.copy_(total)

    def _exchange(self, holders: list[int], grads: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send this rank's gradients to the other holders, return all of them by stage."""
        received = {index: grad.clone() for index, grad in grads.items()}
        like = next(iter(grads.values()))
        peers = {self._specs[i].pp_rank for i in holders} - {self._rank}
        transfers = []
        for index in holders:
            owner = self._specs[index].pp_rank
            if owner == self._rank:
                transfers += [self._transfer(dist.isend, received[index], p) for p in peers]
            else:
                received[index] = torch.empty_like(like)
                transfers.append(self._transfer(dist.irecv, received[index], owner))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        return received

    def _transfer(self, kind: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        assert self._group is not None
        return dist.P2POp(kind, tensor, dist.get_global_rank(self._group, peer), self._group)


def clip_gradients(
    stages: Sequence[Stage], shared: SharedParameters, mesh: DeviceMesh, max_norm: float
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Parameters live on different meshes (tp or not), so each local shard is counted as often as
    there are ranks that hold it, and the sum over all ranks is corrected by that.

    Returns:
        The norm before scaling, the same on every rank.
    """
    pp_size = mesh["pp"].size() if "pp" in _axes(mesh) else 1
    device = stages[0].device
    grads_by_copies: dict[int, list[Tensor]] = {}
    all_grads: list[Tensor] = []
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.grad is None:
                continue
            all_grads.append(_local(parameter.grad))
            if id(parameter) not in shared.copies:
                copies = mesh.size() // pp_size // _num_shards(parameter)
                grads_by_copies.setdefault(copies, []).append(all_grads[-1])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in grads_by_copies.items():
        total += nn.utils.get_total_norm(grads).double() ** 2 / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in all_grads:
        grad.mul_(scale.to(grad.dtype))
    return norm


def _num_shards(parameter: Tensor) -> int:
    """Return in how many different shards a parameter is held."""
    count = 1
    if isinstance(parameter, DTensor):
        for axis, kept in enumerate(parameter.placements):
            count *= 1 if kept.is_replicate() else parameter.device_mesh.size(axis)
    return count


# ---------------------------------------------------------------------------------------------
# 8. Checkpoints: the user's own parameter names, readable in any other layout
# ---------------------------------------------------------------------------------------------


def named_parameters(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters under the first name that the user's model has for them.

    Parts of a fused projection keep their number: "attn.c_attn.weight_0".
    """
    prefix = "model." if isinstance(stage, Stage) else ""
    first_names = stage.anatomy.first_names if isinstance(stage, Stage) else {}
    for name, parameter in stage.named_parameters():
        own = name.removeprefix(prefix)
        yield first_names.get(own, own), parameter


def _gather_parts(
    stages: Sequence[nn.Module], values: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Join the parts of fused projections, so that checkpoints do not depend on the layout.

    Args:
        stages: Stages, or the plain model.
        values: One tensor per parameter, by the names of ``named_parameters``.

    Returns:
        Tensors by the user's names, and the parts of those that were joined.
    """
    whole = {name: value.detach() for name, value in values.items()}
    joined: dict[str, list[Tensor]] = {}
    for stage in stages:
        if not isinstance(stage, Stage):
            continue
        for path, count in stage.fused_modules.items():
            for name in ("weight", "bias"):
                parts = [whole.pop(f"{path}.{name}_{i}", None) for i in range(count)]
                present = [part for part in parts if part is not None]
                if present:
                    joined[f"{path}.{name}"] = present
                    whole[f"{path}.{name}"] = _join(present)
    return whole, joined


def _join(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    assert isinstance(first, DTensor)
    if first.shape[0] % _num_shards(first):
        raise ValueError(
            f"{first.shape[0]} features of a fused projection do not divide into "
            f"{_num_shards(first)} shards (tp x dp_shard): such a layout has no checkpoints"
        )
    full = torch.cat([part.full_tensor() for part in parts if isinstance(part, DTensor)])
    placements = [kept if kept.is_replicate() else Shard(0) for kept in first.placements]
    return distribute_tensor(full, first.device_mesh, placements, src_data_rank=None)


def _scatter_parts(whole: Mapping[str, Tensor], joined: Mapping[str, list[Tensor]]) -> None:
    """Copy joined tensors back into their parts."""
    for name, parts in joined.items():
        value = whole[name]
        assert isinstance(value, DTensor)
        for piece, part in zip(value.full_tensor().chunk(len(parts)), parts, strict=True):
            assert isinstance(part, DTensor)
            mesh, placements = part.device_mesh, part.placements
            shard = distribute_tensor(piece, mesh, placements, src_data_rank=None)
            part._local_tensor.copy_(shard._local_tensor)


@dataclass(slots=True)
class Checkpointer:
    """Saves and loads weights, AdamW moments and the step."""

    modules: Sequence[nn.Module]
    """This rank's stages, or the plain model."""
    optimizers: Sequence[torch.optim.Optimizer]
    """AdamW over their parameters."""

    def save(self, folder: Path, step: int) -> None:
        """Write the state after ``step`` steps into a folder of its own below ``folder``."""
        state, _ = self._state(step)
        _write(state, folder / f"step-{step:08d}")

    def save_if_due(self, options: Options, step: int) -> None:
        """Save where ``--checkpoint`` is given and this is the last step or one in between."""
        every = options.checkpoint_every
        if options.checkpoint is None:
            return
        if step == options.steps or (every and step % every == 0):
            self.save(options.checkpoint, step)

    def resume(self, folder: Path | None) -> int:
        """Load the newest checkpoint below ``folder``.

        Returns:
            The number of steps that it has seen.

        Raises:
            FileNotFoundError: There is no complete checkpoint.
        """
        found = folder.glob("step-*/.metadata") if folder is not None else ()
        saved = sorted(path.parent for path in found)
        if not saved:
            raise FileNotFoundError(f"{folder} holds no complete checkpoint to resume from")
        step = int(saved[-1].name.removeprefix("step-"))
        state, joined = self._state(step)
        _read(state, saved[-1])
        for kind, parts in joined.items():
            _scatter_parts(state[kind], parts)
        return step

    def load_weights(self, checkpoint: Path) -> None:
        """Load weights only, from a checkpoint of one step or from ``--write-init``."""
        values = dict(item for module in self.modules for item in named_parameters(module))
        whole, joined = _gather_parts(self.modules, values)
        _read({"weights": whole}, checkpoint)
        _scatter_parts(whole, joined)

    def _state(self, step: int) -> tuple[dict[str, Any], dict[str, dict[str, list[Tensor]]]]:
        """Return the state to save or to load into, and the parts of joined tensors."""
        kinds: dict[str, dict[str, Tensor]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        optimizer_of = {
            id(parameter): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for module in self.modules:
            for name, parameter in named_parameters(module):
                moments = adamw_state(optimizer_of[id(parameter)], parameter, step)
                kinds["weights"][name] = parameter
                kinds["exp_avg"][name] = moments["exp_avg"]
                kinds["exp_avg_sq"][name] = moments["exp_avg_sq"]
        state: dict[str, Any] = {}
        joined: dict[str, dict[str, list[Tensor]]] = {}
        for kind, values in kinds.items():
            state[kind], joined[kind] = _gather_parts(self.modules, values)
        return state, joined


def _write(state: dict[str, Any], folder: Path) -> None:
    with _quiet_on_one_process() as alone:
        dcp.save(state, checkpoint_id=folder, no_dist=alone)  # type: ignore[attr-defined]


def _read(state: dict[str, Any], folder: Path) -> None:
    with _quiet_on_one_process() as alone:
        dcp.load(state, checkpoint_id=folder, no_dist=alone)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _quiet_on_one_process() -> Iterator[bool]:
    """Yield whether this is a run on one process, of which DCP would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()


def adamw_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, step: int
) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter; where it has none, zeros after ``step`` steps."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(float(step), device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def write_init(model: UserModel, seed: int, options: Options) -> None:
    """Build the model on this process and write its weights to ``--write-init DIR``."""
    assert options.write_init is not None
    built = build_on_cpu(model, seed, options)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    _write({"weights": weights}, options.write_init)


# ---------------------------------------------------------------------------------------------
# 9. Log, and the same training on one process
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Log:
    """Reports steps on the screen and as JSON lines, from rank 0."""

    file: Path | None
    """Gets one JSON object per step, None for the screen alone."""
    tokens_per_step: int
    """Tokens (samples where there are none) per step."""
    device: torch.device
    """Whose memory is reported."""
    _started_s: float = 0.0

    def start_step(self) -> None:
        """Take the time at which a step begins."""
        self._started_s = time.perf_counter()

    def end_step(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Report a step: times and memory are those of the slowest and the fullest rank.

        Args:
            step: Steps taken so far, this one included.
            loss: Mean loss over the global batch, before the step.
            grad_norm: Norm of the whole gradient before clipping.
        """
        loss_value, norm_value = loss.item(), grad_norm.item()  # waits for the device
        seen = [time.perf_counter() - self._started_s, float(peak_memory_bytes(self.device))]
        worst = torch.tensor(seen, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if dist.get_rank() != 0:
                return
        step_time_s, memory_bytes = worst.tolist()
        row = {
            "step": step,
            "loss": loss_value,
            "grad_norm": norm_value,
            "step_time_s": step_time_s,
            "tokens_per_s": self.tokens_per_step / step_time_s,
            "peak_memory_bytes": int(memory_bytes),
        }
        sys.stdout.write(
            f"step {step}: loss {loss_value:.6f}, grad norm {norm_value:.4f}, "
            f"{step_time_s * 1e3:.0f} ms, {row['tokens_per_s']:.0f} tokens/s, "
            f"peak {memory_bytes / 2**30:.2f} GiB\n"
        )
        sys.stdout.flush()
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("w" if step == 1 else "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory allocated on the GPU, or the peak resident size of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def train_reference(
    batches: Batches,
    options: Options,
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    *,
    microbatch_size: int,
    max_grad_norm: float,
    tokens_per_step: int,
) -> None:
    """Train the plain model on one process: same weights, same global batches, same optimiser."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_on_cpu(batches.model, batches.seed, options).to(device)
    optimizer = make_optimizer(model.parameters())
    checkpointer = Checkpointer(modules=[model], optimizers=[optimizer])
    if options.init is not None:
        checkpointer.load_weights(options.init)
    first = checkpointer.resume(options.checkpoint) if options.resume else 0
    log = Log(file=options.log, tokens_per_step=tokens_per_step, device=device)
    num_microbatches = batches.global_batch_size // microbatch_size
    for step in range(first, options.steps):
        log.start_step()
        torch.manual_seed(_seed(batches.seed, step, 0, 0))
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
        log.end_step(step + 1, loss, norm)
        checkpointer.save_if_due(options, step + 1)


def _run_reference(model: nn.Module, inputs: Tree, options: Options) -> Tree:
    """Run the plain model with its parameters cast to the compute dtype."""
    if options.dtype is options.master_dtype:
        return run_model(model, inputs)
    cast = {name: p.to(options.dtype) for name, p in model.named_parameters()}
    keywords = inputs if isinstance(inputs, Mapping) else {}
    args = () if keywords else inputs if isinstance(inputs, tuple | list) else (inputs,)
    return torch.func.functional_call(model, cast, tuple(args), dict(keywords))
