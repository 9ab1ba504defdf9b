"""Who reads the parameters of a model."""

from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Who reads a parameter, anywhere in the model."""

    modules: frozenset[str]
    """Modules that hold it, by path."""
    num_structures: int
    """How many structures the units have in which they run."""
    others: bool
    """Whether something else reads it: a head that is a product with ``embedding.weight``, a
    penalty on weights."""


def parameter_modules(graph: OperatorGraph) -> frozenset[str]:
    """Paths of the modules that run with parameters and call no other such module.

    They may hold modules whose parameters they use themselves, as ``nn.MultiheadAttention`` does
    with its output projection, which it never calls.
    """
    owners = {name.rpartition(".")[0] for parameter in graph.parameters for name in parameter.names}
    called = {op.module for op in graph.nodes if op.phase == "forward"}
    running = owners & set().union(*map(_around, called))
    callers = set().union(*(_around(owner) - {owner} for owner in running))
    return frozenset(running - callers - {""})


def _around(path: str) -> set[str]:
    """A module and those that hold it."""
    return {path, *(path[:i] for i, letter in enumerate(path) if letter == ".")}


def leaf_of(module: str, leaves: frozenset[str]) -> str:
    """The parameter-owning module that holds ``module``, "" where there is none."""
    while module and module not in leaves:
        module = module.rpartition(".")[0]
    return module


def readers_of_parameters(graph: OperatorGraph, leaves: frozenset[str]) -> dict[int, Readers]:
    """Who reads each parameter, by storage."""
    structures = {op: unit.structure for unit in graph.units for op in unit.forward_ops}
    owners = {
        parameter.storage: {leaf_of(name.rpartition(".")[0], leaves) for name in parameter.names}
        for parameter in graph.parameters
    }
    reads: dict[int, dict[tuple[str, str], None]] = {storage: {} for storage in owners}
    for op in graph.nodes:
        if op.id not in structures:
            continue
        for storage in {graph.values[value].storage for value in op.inputs} & owners.keys():
            reads[storage][leaf_of(op.module, leaves), structures[op.id]] = None
    return {
        storage: Readers(
            modules=frozenset(module for module, _ in found if module in owners[storage] - {""}),
            num_structures=len({structure for _, structure in found}),
            others=any(module not in owners[storage] - {""} for module, _ in found),
        )
        for storage, found in reads.items()
    }
