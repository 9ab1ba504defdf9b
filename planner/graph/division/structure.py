"""Hashing what a unit computes, so that repeated blocks are priced once."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from planner.graph.operator_graph import OpNode, StorageKind
from planner.graph.recording.recording import Recording

_RANDOM_OPS = frozenset(
    {"native_dropout", "native_dropout_backward", "bernoulli", "bernoulli_", "bernoulli_p"}
)
"""Ops whose probability is left out: stochastic depth gives every layer its own."""

_HASH_LENGTH = 16

Key = TypeVar("Key")


class UnitLike(Protocol):
    """What is hashed of a unit."""

    @property
    def path(self) -> str:
        """Path of its module, "" for what no single module runs."""

    @property
    def forward_ops(self) -> tuple[int, ...]:
        """Its forward ops."""

    @property
    def backward_ops(self) -> tuple[int, ...]:
        """Its backward ops."""


def structure_hashes(recording: Recording, units: Mapping[Key, UnitLike]) -> dict[Key, str]:
    """Hash the ops of units with everything that depends on their place made relative.

    Two units get the same hash if and only if they run the same ops on the same shapes with the
    same arguments, wired in the same way, in modules and with parameters of the same relative
    names, save the same tensors for backward, and may multiply in float8 in the same modules.
    """
    known: dict[tuple[object, ...], str] = {}
    hashes: dict[Key, str] = {}
    for key, unit in units.items():
        tokens = _unit_tokens(recording, unit)
        if tokens not in known:
            digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
            known[tokens] = digest[:_HASH_LENGTH]
        hashes[key] = known[tokens]
    return hashes


def _unit_tokens(recording: Recording, unit: UnitLike) -> tuple[object, ...]:
    ops, values, storages = recording.ops, recording.values, recording.storages
    path = unit.path
    number: dict[int, int] = {}
    op_number: dict[int, int] = {}
    tokens: list[object] = []
    for op_id in (*unit.forward_ops, *unit.backward_ops):
        op = ops[op_id]
        op_number[op_id] = len(op_number)
        for value in (*op.inputs, *op.outputs):
            if value not in number:
                number[value] = len(number)
                tensor = values[value]
                storage = storages[tensor.storage]
                owned = storage.kind is not StorageKind.ACTIVATION
                tokens.append(
                    (
                        tensor.shape,
                        tensor.dtype,
                        tensor.requires_grad,
                        storage.kind.value,
                        _relative(storage.name, path) if owned else "",
                    )
                )
        tokens.append(_op_token(op, path, number, op_number))
        tokens.append(op.module in recording.float8_modules)
    return tuple(tokens)


def _op_token(
    op: OpNode, path: str, number: Mapping[int, int], op_number: Mapping[int, int]
) -> tuple[object, ...]:
    return (
        op.name,
        op.phase.value,
        _relative(op.module, path),
        _numbers(op.inputs, number),
        _numbers(op.outputs, number),
        () if op.name in _RANDOM_OPS else op.arguments,
        op.keyword_arguments,
        op.flop,
        op.read_bytes,
        op.write_bytes,
        -1 if op.forward_op is None else op_number.get(op.forward_op, -1),
        _numbers(op.saved_inputs, number),
        _numbers(op.saved_outputs, number),
        _numbers(op.saved_in_vain, number),
    )


def _numbers(values: Sequence[int], number: Mapping[int, int]) -> tuple[int, ...]:
    return tuple([number[value] for value in values])


def _relative(name: str, path: str) -> str:
    if name == path:
        return "."
    return name[len(path) :] if name.startswith(path + ".") else "@" + name
