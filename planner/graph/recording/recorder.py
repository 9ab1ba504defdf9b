"""Recording one training step: every op of forward and backward, on tensors without data.

A dispatch mode sees each ATen op below autograd, so that the graph is what a training run
executes: composite ops are split, backward is autograd's own. Tensors live on the meta device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph import torch_private
from planner.graph.loading.hints import Hint
from planner.graph.loading.source import lines_of_stack
from planner.graph.operator_graph import Phase, StorageKind
from planner.graph.recording import work
from planner.graph.recording.data_reads import DataReads, has_mask
from planner.graph.recording.gradients import Gradients
from planner.graph.recording.held_names import HeldNames
from planner.graph.recording.known_values import KnownValues
from planner.graph.recording.meta_results import MetaResults
from planner.graph.recording.raw_op import (
    OpKind,
    RawOp,
    draws,
    op_kind,
    plain,
    tensors_in,
    written_tensors,
)
from planner.graph.recording.real_tensors import RealTensors
from planner.graph.recording.recording import ModuleCall
from planner.graph.recording.refusals import MOST_OPS, check_operands, too_many_ops
from planner.graph.recording.replaced_buffers import ReplacedBuffers
from planner.graph.recording.saved_tensors import SavedTensors
from planner.graph.recording.value_table import ValueTable
from planner.graph.torch_private import TorchOp, TorchResult

_SUMS = frozenset({"add", "add_"})
"""Ops by which autograd adds up the gradients that several readers of a value return."""

_META = torch.device("meta")


@dataclass(slots=True)
class _OpenCall:
    """A module's forward that has begun and not ended."""

    position: int
    module: str
    first_op: int
    first_argument: int | None


class Recorder(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops that run inside of it; see ``recording`` for the set-up around it."""

    def __init__(self, model: nn.Module, hints: Sequence[Hint] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RawOp] = []
        self.calls: list[ModuleCall | None] = []
        self.called_again: dict[str, None] = {}
        """Modules that run in the backward pass."""
        """In order of entry, None while a call is open."""
        self.known = KnownValues()
        self._names = HeldNames()
        self.named_until: Mapping[int, int] = {}
        """Of a storage that code holds beyond its use: the last op before which it did."""
        self.table = ValueTable(self.known.observe_renewal, self._names)
        self.data = DataReads(self.table, self.known, hints, lambda: len(self.ops))
        self.real_tensors = RealTensors(self.table, self.known)
        self._gradients = Gradients(self.table)
        self.phase = Phase.FORWARD
        self.draws: list[tuple[int, str]] = []
        """Ops of forward that draw random numbers, and the line of each."""
        self._results = MetaResults()
        self._saved = SavedTensors(self.table, self.ops)
        self.paths: dict[int, str] = {}
        self._stack: list[str] = [""]
        self._open_calls: list[_OpenCall | None] = []
        self._op_of_sequence: dict[int, int] = {}
        self._last_sequence = -1
        self._unpacked: int | None = None
        self._replaced = ReplacedBuffers(model)
        self._name_modules(model)

    def _name_modules(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            self.paths[id(module)] = path
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.table.register(parameter, StorageKind.PARAMETER, name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self.table.register(buffer, StorageKind.BUFFER, name)

    # Modules -----------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note that a module's forward begins."""
        path = self.paths.get(id(module))
        self._stack.append(self._stack[-1] if path is None else path)
        call = None
        if self.phase is Phase.FORWARD and path is not None:
            call = _OpenCall(len(self.calls), path, len(self.ops), self._first_tensor(args))
            self.calls.append(None)
        elif path is not None:
            self.called_again[path] = None
        self._open_calls.append(call)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the calls of the model's modules."""
        # Hooks for all modules of the process do not see keyword arguments.
        handles = [
            module.register_forward_pre_hook(self._see_keywords, with_kwargs=True)
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        try:
            with torch_private.module_hooks(self.enter_module, self.leave_module):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _see_keywords(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the first tensor among keyword arguments, where no positional one is a tensor."""
        call = self._open_calls[-1] if self._open_calls else None
        if kwargs and call is not None and call.first_argument is None:
            call.first_argument = self._first_tensor(tuple(kwargs.values()))

    def _first_tensor(self, arguments: tuple[Any, ...]) -> int | None:
        for argument in arguments:
            if isinstance(argument, Tensor) and not torch_private.is_transformed(argument):
                return self.table.read(argument, keep=True)
        return None

    def leave_module(self, module: nn.Module, output: TorchResult) -> None:
        """Note that a module's forward ends."""
        if len(self._stack) == 1:
            return
        if self.phase is Phase.FORWARD:
            self._replaced.write(module)
        self._stack.pop()
        call = self._open_calls.pop()
        if call is None:
            return
        leaves = [output] if isinstance(output, Tensor) else torch_private.tree_leaves(output)
        self.calls[call.position] = ModuleCall(
            module=call.module,
            first_op=call.first_op,
            end_op=len(self.ops),
            first_argument=call.first_argument,
            outputs=tuple(
                [
                    self.table.read(leaf, keep=True)
                    for leaf in leaves
                    if isinstance(leaf, Tensor) and not torch_private.is_transformed(leaf)
                ]
            ),
        )

    # Saved tensors -----------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Tensor:
        """Note that autograd keeps a tensor."""
        self._saved.note(tensor, self._last_sequence, forward=self.phase is Phase.FORWARD)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """Note which value comes back; torch detaches the result, which is no op of the step."""
        self._saved.take(tensor)
        self._unpacked = id(tensor)
        return tensor

    def start_backward(self) -> None:
        """Note that forward, the loss included, has ended."""
        self._saved.end_forward()
        self.named_until = self._names.last_ops()
        self.phase = Phase.BACKWARD
        self.data.again = True
        self._gradients.watch()

    def end_backward(self, loss: Tensor) -> None:
        """Note that the step has ended."""
        self._saved.end_backward(loss)
        for op in reversed(self.ops):
            if op.phase is Phase.BACKWARD and op.name in _SUMS:
                self._gradients.note_sum(op.inputs, op.outputs)

    # Ops ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: TorchOp,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> TorchResult:
        """Run one op on meta tensors and record it."""
        kwargs = kwargs or {}
        kind = op_kind(func)
        keep = self.phase is Phase.FORWARD
        self._names.before(len(self.ops), forward=keep)
        tensors = tensors_in((*args, *kwargs.values()) if kwargs else args, [])
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        if self._unpacked is not None:
            unpacked, self._unpacked = self._unpacked, None
            if kind.name == "detach" and id(args[0]) == unpacked:
                return func(*args, **kwargs)
        if not all([tensor.is_meta for tensor in tensors]):
            if kind.name == "lift_fresh":
                return self.real_tensors.lift(tensors[0])
            args, kwargs = self.real_tensors.replace(kind.name, args, kwargs, tensors)
            tensors = tensors_in((*args, *kwargs.values()), [])
        inputs = tuple([self.table.read(tensor, keep=keep) for tensor in tensors])
        sequence = torch_private.next_sequence_number()
        self._last_sequence = sequence
        out = self._run(kind, func, (args, kwargs), inputs, tensors)
        if not isinstance(out, (Tensor, tuple, list)) or func.namespace == "prim":
            return out
        made = tensors_in((out,), [])
        op = self._record(kind, (args, kwargs), (inputs, tensors), made)
        op.forward_op = self._link(sequence, op)
        self._saved.attribute_to(op)
        # Gradients are left out.
        if op.outputs and (keep or self._recomputes()):
            if not kind.written:
                self.known.observe(func, (args, kwargs), inputs, op.outputs, made)
            elif kind.written[0][0] == 0 and len(kind.written) == 1:
                self.known.observe_write(func, (args, kwargs), inputs, op.outputs[0], tensors[0])
        return out

    def _run(
        self,
        kind: OpKind,
        func: TorchOp,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: tuple[int, ...],
        tensors: Sequence[Tensor],
    ) -> TorchResult:
        args, kwargs = arguments
        if kind.is_random and self.phase is Phase.FORWARD and draws(func, args, kwargs):
            line = next(lines_of_stack(), None)
            self.draws.append((len(self.ops), f"{line.place} ({line.code})" if line else kind.name))
        if kind.one_dtype:
            check_operands(kind.name, tensors)
        if kind.dynamic and (kind.name != "index" or has_mask(args[1])):
            return self.data.run(func, arguments, inputs)
        if kind.is_fresh:
            return self._results.run(func, args, kwargs)
        return func(*args, **kwargs)

    def _record(
        self,
        kind: OpKind,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        read: tuple[tuple[int, ...], list[Tensor]],
        made: list[Tensor],
    ) -> RawOp:
        args, kwargs = arguments
        inputs, tensors = read
        keep = self.phase is Phase.FORWARD
        renewed: list[int] = []
        if kind.written:
            targets = written_tensors(kind, args, kwargs)
            changed = {id(target) for target in targets}
            made = [*targets, *(tensor for tensor in made if id(tensor) not in changed)]
            outputs = tuple(
                [self.table.overwrite(target, renewed, keep=keep) for target in targets]
                + [self.table.write(tensor, keep=keep) for tensor in made[len(targets) :]]
            )
        else:
            outputs = tuple([self.table.write(tensor, keep=keep) for tensor in made])
        read_bytes, write_bytes = self._traffic_bytes(kind, (inputs, tensors), (outputs, made))
        op = RawOp(
            name=kind.name,
            module=self._stack[-1],
            phase=self.phase,
            is_view=kind.is_view,
            is_pointwise=kind.is_pointwise,
            inputs=inputs,
            outputs=outputs,
            arguments=tuple([plain(argument) for argument in args]),
            keyword_arguments=tuple(sorted((name, plain(kwargs[name])) for name in kwargs)),
            flop=0 if kind.is_view else work.flop(kind.name, args, made),
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            forward_op=None,
            renewed=renewed,
        )
        self.ops.append(op)
        if len(self.ops) > MOST_OPS:
            raise too_many_ops(MOST_OPS)
        return op

    def _traffic_bytes(
        self,
        kind: OpKind,
        read: tuple[Sequence[int], Sequence[Tensor]],
        made: tuple[Sequence[int], Sequence[Tensor]],
    ) -> tuple[int, int]:
        """Bytes read and written, 0 for a view."""
        if kind.is_view:
            return 0, 0
        size = self.table.size_bytes
        return work.traffic_bytes(
            kind.name,
            [size(value, tensor) for value, tensor in zip(*read, strict=True)],
            [size(value, tensor) for value, tensor in zip(*made, strict=True)],
            in_place=bool(kind.written),
        )

    def _recomputes(self) -> bool:
        """Tell whether backward runs a part of forward again: modules, or with gradients on."""
        return self.phase is Phase.BACKWARD and (len(self._stack) > 1 or torch.is_grad_enabled())

    def _link(self, sequence: int, op: RawOp) -> int | None:
        """Connect an op to autograd's nodes: forward ops are named, backward ops look them up."""
        position = len(self.ops) - 1
        node = torch_private.current_node() if self.phase is Phase.BACKWARD else None
        if node is None:
            self._op_of_sequence.setdefault(sequence - 1, position)
            return None
        op.is_of_function = isinstance(node, torch.autograd.function.BackwardCFunction)
        forward_op = self._op_of_sequence.get(torch_private.node_sequence_number(node))
        if self._recomputes():
            # The op made the newest node; outside of modules it belongs to what wants it.
            self._op_of_sequence.setdefault(sequence - 1, position)
            if forward_op is not None and len(self._stack) == 1:
                op.module = self.ops[forward_op].module
            return None
        if forward_op is not None:
            op.module = self.ops[forward_op].module
        elif (variable := getattr(node, "variable", None)) is not None:
            value = self.table.read(variable, keep=False)
            op.module = self.table.name_of(value).rpartition(".")[0]
            op.accumulates = self.table.keys[value][0]
            for gradient in (*op.inputs, *op.outputs):
                self._gradients.note(gradient, value)
        return forward_op
