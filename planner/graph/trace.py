"""One traced training step as immutable data, and the operator graph made from it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from planner.collector import paused_collector
from planner.graph import torch_private
from planner.graph.division.units import assemble, find_layout
from planner.graph.loading.batch import Batch, check_call
from planner.graph.loading.build import BuiltModel
from planner.graph.loading.devices import TracingMode
from planner.graph.loading.fixed_seed import fixed_seed
from planner.graph.loading.hints import check_hints_used
from planner.graph.loading.loaded_model import LoadedModel, default_dtype
from planner.graph.operator_graph import (
    OperatorGraph,
    OpNode,
    Parameter,
    Storage,
    StorageKind,
    TensorValue,
)
from planner.graph.recording.autocast import AutocastOnMeta
from planner.graph.recording.flex_attention import FlexOnMeta
from planner.graph.recording.kernels import fused_kernels
from planner.graph.recording.operand_forms import operands_of
from planner.graph.recording.raw_op import RawOp
from planner.graph.recording.recorder import Recorder
from planner.graph.recording.recording import ModuleListing, Recording
from planner.graph.recording.trace_progress import TraceProgress
from planner.graph.recording.value_table import ViewKey
from planner.progress import ProgressCallback
from planner.runtime.float8 import multiplies_in_float8

_DRAWS = (
    "the forward pass draws from the random generator of Python or numpy: the trace is that of one"
    " draw, and training may run another program in every step"
)


def trace_model(
    model: LoadedModel,
    *,
    microbatch_size: int,
    dtype: str,
    progress: ProgressCallback | None = None,
) -> OperatorGraph:
    """Trace one training step of a model without allocating weights.

    Args:
        model: The model with its data and loss.
        microbatch_size: Samples in the microbatch.
        dtype: Compute dtype: "bfloat16", "float32" or "float64".
        progress: Called with how far the step is, several times a second.

    Raises:
        ModelError: The model cannot be built, run or differentiated without data.
        RequestError: A hint does not fit, or no line asked for it.
    """
    with paused_collector():
        recording = record_step(
            model, microbatch_size=microbatch_size, dtype=dtype, progress=progress
        )
        check_hints_used(model.hints, recording.used_hints, recording.asked_places)
        return assemble(recording, find_layout(recording))


def record_step(
    model: LoadedModel,
    *,
    microbatch_size: int,
    dtype: str,
    progress: ProgressCallback | None = None,
) -> Recording:
    """Run forward and backward on the meta device and record every op; see ``trace_model``."""
    _load_compiler()
    compute = getattr(torch, dtype)
    built = model.build_meta(dtype)
    module = built.module
    batch = model.example_batch(microbatch_size)
    check_call(module, batch)
    recorder = Recorder(module, model.hints)
    inputs = _place_batch(recorder, batch, compute)
    _know_buffers(recorder, model, built, dtype)
    with (
        default_dtype(compute),
        fused_kernels(),
        paused_collector(),
    ):
        notes, autocast = _run_step(model, module, inputs, recorder, progress)
        recording = freeze(recorder, module, batch, microbatch_size)
    notes = (*model.notes, *built.notes, *notes)
    return replace(recording, model=model.description, dtype=dtype, autocast=autocast, notes=notes)


def _load_compiler() -> None:
    """Let torch load its compiler, as the first op does that asks whether it is compiled.

    The frames of an import in a step would outlive it, and so would all that its code names.
    """
    torch.compiler.disable(_load_compiler)  # type: ignore[no-untyped-call]


def _run_step(
    model: LoadedModel,
    module: nn.Module,
    batch: Batch,
    recorder: Recorder,
    progress: ProgressCallback | None,
) -> tuple[tuple[str, ...], str]:
    """Run the step; return what is to be said of it, and the line that uses autocast."""
    watched = None if progress is None else TraceProgress(recorder, module, progress)
    keeper = watched or recorder
    saved = torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack)
    mode = TracingMode(recorder.data.read)
    autocast, flex = AutocastOnMeta(), FlexOnMeta()
    with (
        fixed_seed() as has_drawn,
        recorder.watching(module),
        saved,
        recorder,
        mode,
        autocast.active(),
        flex.active(),
    ):
        with model.running(f"The forward pass of {model.description}"):
            output = module(*batch.args, **batch.kwargs)
        loss = model.loss(output, batch.targets)
        recorder.start_backward()
        with model.running(f"The backward pass of {model.description}"), mode.in_backward():
            torch.autograd.backward(loss)
        recorder.end_backward(loss)
        drew = has_drawn()
    if watched:
        watched.end_step()
    if recorder.data.failure is not None:
        # The model's own code caught it and went another way than training does.
        raise recorder.data.failure
    tellers = recorder.data, recorder.real_tensors, mode.strays, autocast, flex
    notes = tuple(note for teller in tellers for note in teller.notes)
    return (*notes, *((_DRAWS,) if drew else ())), autocast.place


def _place_batch(recorder: Recorder, batch: Batch, compute: torch.dtype) -> Batch:
    """Move a batch to the meta device as the script would cast it; its data stays known."""
    counter = iter(range(1 << 30))

    def place(tensor: Tensor, kind: StorageKind) -> Tensor:
        meta = torch.empty_like(tensor, device="meta")
        if kind is StorageKind.INPUT and tensor.is_floating_point():
            meta = meta.to(compute)
        value = recorder.table.register(meta, kind, f"input{next(counter)}")
        if not tensor.is_meta:
            recorder.known.seed(value, tensor.to(meta.dtype))
        return meta

    args, kwargs = torch_private.tree_map_only(
        Tensor, lambda tensor: place(tensor, StorageKind.INPUT), (batch.args, batch.kwargs)
    )
    targets = torch_private.tree_map_only(
        Tensor, lambda tensor: place(tensor, StorageKind.TARGET), batch.targets
    )
    return Batch(args=args, kwargs=kwargs, targets=targets)


def _know_buffers(recorder: Recorder, model: LoadedModel, built: BuiltModel, dtype: str) -> None:
    """Let small buffers have the data that they are built with, made when it is asked for."""
    made: dict[str, Tensor] = dict(built.buffers)
    again = iter((lambda: model.first_buffers(dtype),))

    def first(name: str) -> Tensor | None:
        if name not in made and (build := next(again, None)):
            made.update(build())
        return made.get(name)

    for name, buffer in built.module.named_buffers():
        value = recorder.table.read(buffer, keep=True)
        recorder.known.seed_later(value, partial(first, name))


def freeze(recorder: Recorder, module: nn.Module, batch: Batch, microbatch_size: int) -> Recording:
    """Return what a recorder has seen of a module on a batch as immutable data."""
    table = recorder.table
    dtype_names: dict[torch.dtype, str] = {}
    values = []
    for position, (storage, _, shape, _, dtype) in enumerate(table.keys):
        if (name := dtype_names.get(dtype)) is None:
            name = dtype_names[dtype] = str(dtype).removeprefix("torch.")
        values.append(
            TensorValue(
                id=position,
                storage=storage,
                shape=tuple(shape),
                dtype=name,
                requires_grad=table.requires_grad(position),
            )
        )
    return Recording(
        microbatch_size=microbatch_size,
        tokens_per_sample=_tokens_per_sample(batch, microbatch_size),
        storages=tuple(_storages(recorder)),
        values=tuple(values),
        ops=tuple([_freeze_op(at, op, table.keys) for at, op in enumerate(recorder.ops)]),
        parameters=_parameters(recorder, module),
        calls=tuple(call for call in recorder.calls if call is not None),
        lists=_module_lists(recorder, module),
        float8_modules=_float8_modules(module),
        accumulations={
            position: op.accumulates
            for position, op in enumerate(recorder.ops)
            if op.accumulates is not None
        },
        used_hints=recorder.data.used_hints,
        asked_places=recorder.data.asked_places,
        data_reads=recorder.data.answered,
        decisions=tuple(recorder.data.decisions),
        counting_ops=tuple(recorder.data.counting_ops),
        draws=tuple(recorder.draws),
        called_again=tuple(recorder.called_again),
    )


def _storages(recorder: Recorder) -> Iterator[Storage]:
    for position, entry in enumerate(recorder.table.storages):
        yield Storage(
            id=position,
            size_bytes=entry.size_bytes,
            kind=entry.kind,
            name=entry.name,
            gradient_of=entry.gradient_of,
            named_until=recorder.named_until.get(position),
        )


def _freeze_op(position: int, op: RawOp, keys: Sequence[ViewKey]) -> OpNode:
    return OpNode(
        id=position,
        name=op.name,
        module=op.module,
        phase=op.phase,
        is_view=op.is_view,
        is_pointwise=op.is_pointwise,
        operands=operands_of(op, keys),
        inputs=op.inputs,
        outputs=(*op.outputs, *op.renewed),
        arguments=op.arguments,
        keyword_arguments=op.keyword_arguments,
        flop=op.flop,
        read_bytes=op.read_bytes,
        write_bytes=op.write_bytes,
        forward_op=op.forward_op,
        is_of_function=op.is_of_function,
        saved_inputs=tuple(dict.fromkeys(op.saved_inputs)),
        saved_outputs=tuple(dict.fromkeys(op.saved_outputs)),
        saved_in_vain=tuple(dict.fromkeys(op.saved_in_vain)),
    )


def _parameters(recorder: Recorder, module: nn.Module) -> tuple[Parameter, ...]:
    table = recorder.table
    gradients = {
        op.accumulates: table.keys[op.outputs[0]][0]
        for op in recorder.ops
        if op.accumulates is not None and op.outputs
    }
    return tuple(
        Parameter(
            names=tuple(table.parameter_names[storage]),
            storage=storage,
            shape=tuple(parameter.shape),
            requires_grad=parameter.requires_grad,
            gradient=gradients.get(storage),
        )
        for parameter in module.parameters()
        for storage in [table.keys[table.read(parameter, keep=True)][0]]
    )


def _float8_modules(module: nn.Module) -> frozenset[str]:
    return frozenset(path for path, each in module.named_modules() if multiplies_in_float8(each))


def _module_lists(recorder: Recorder, module: nn.Module) -> tuple[ModuleListing, ...]:
    return tuple(
        ModuleListing(
            path=path,
            children=tuple(
                (f"{path}.{name}" if path else name, recorder.paths[id(item)])
                for name, item in child._modules.items()
                if item is not None
            ),
        )
        for path, child in module.named_modules()
        if isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    )


def _tokens_per_sample(batch: Batch, microbatch_size: int) -> int:
    for item in (*batch.args, *batch.kwargs.values()):
        if isinstance(item, Tensor) and not item.is_floating_point() and item.dim() == 2:
            return item.shape[1] if item.shape[0] == microbatch_size else 1
    return 1
