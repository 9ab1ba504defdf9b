"""The end of a language model that works on each row alone: logits and their cross-entropy.

From the product of the last states with a table of classes on, everything is a view that keeps the
rows in order, an op on each logit by itself, or the loss of each row, summed up. Such an end can
run some rows at a time, forward and backward, before the next (``planner.runtime.chunked_loss``).
"""

from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph, OpNode, Phase, StorageKind

_LOSS = "nll_loss_forward"
_PRODUCTS = frozenset({"mm", "addmm"})
_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "unsqueeze", "squeeze"}
)
_COPIES = frozenset({"_to_copy", "clone"})
_MEAN, _SUM = 1, 2
"""How torch numbers the reductions of losses."""


_KNOWN = "loss rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """Ops that can run some rows at a time."""

    module: str
    """Path of the module that makes the logits."""
    rows: int
    """Rows of a microbatch."""
    classes: int
    """Logits of a row."""
    states: int
    """Value that enters: (rows, features)."""
    weights: tuple[int, ...]
    """Values that enter beside it: the table, and a bias."""
    forward_ops: tuple[int, ...]
    """The product, what follows, and the loss, in order."""
    backward_ops: tuple[int, ...]
    """Their backward, in order."""

    @property
    def logits(self) -> int:
        """Elements of the logits."""
        return self.rows * self.classes

    def sized(self, graph: OperatorGraph) -> "LossRows":
        """The same ops in a graph that differs in sizes alone."""
        return replace(self, rows=graph.values[self.states].shape[0])


def loss_rows(graph: OperatorGraph) -> LossRows | str:
    """Find such an end, once for a graph.

    Returns:
        Why there is none, as a clause, where there is none.
    """
    found: LossRows | str | None = graph.known.get(_KNOWN)
    if found is None:
        found = graph.known[_KNOWN] = _found(graph)
    return found


def tell_loss_rows(known: OperatorGraph, graph: OperatorGraph) -> None:
    """Let a graph have the end that was found in one from which it differs in sizes alone."""
    found = loss_rows(known)
    if isinstance(found, LossRows):
        graph.known[_KNOWN] = found.sized(graph)


def _found(graph: OperatorGraph) -> LossRows | str:
    losses = [op for op in graph.nodes if op.name == _LOSS]
    if len(losses) != 1:
        return f"the model has {len(losses) or 'no'} cross-entropies over classes, not one"
    (loss,) = losses
    if len(loss.inputs) != 2 or loss.arguments[3] not in (_MEAN, _SUM):
        return "the cross-entropy weighs its classes, or is not reduced to a mean or a sum"
    chain = _chain(graph, loss)
    if isinstance(chain, str):
        return chain
    product = graph.nodes[chain[0]]
    *bias, states, table = product.inputs
    of_parameters = {
        name for value in (*bias, table) for name in _parameter_names(graph, value, product.module)
    }
    if len(of_parameters) != len(bias) + 1 or f"{product.module}.weight" not in of_parameters:
        return "the logits are made by no torch.nn.Linear of the model's own"
    if graph.autocast:
        return f"{graph.autocast} uses autocast"
    if not set(chain) <= set(graph.units[-1].forward_ops):
        return "the logits are made in a block"
    members = frozenset(chain)
    return LossRows(
        module=product.module,
        rows=graph.values[states].shape[0],
        classes=graph.values[table].shape[-1],
        states=states,
        weights=(*bias, table),
        forward_ops=chain,
        backward_ops=tuple(op.id for op in graph.nodes if op.forward_op in members),
    )


def _chain(graph: OperatorGraph, loss: OpNode) -> tuple[int, ...] | str:
    """Ops from the product to the loss, or why they do not work on rows alone."""
    # A few values of tens of thousands are asked for: tables of all take longer to make.
    forward = [op for op in graph.nodes if op.phase is Phase.FORWARD]

    def is_shared(value: int) -> bool:
        return sum(op.inputs.count(value) for op in forward if value in op.inputs) > 1

    classes = graph.values[loss.inputs[0]].shape[-1]
    found = [loss]
    while found[-1].name not in _PRODUCTS:
        value = found[-1].inputs[0]
        if is_shared(value) or graph.values[value].shape[-1] != classes:
            return f"what {found[-1].name} of the loss reads is read by other ops too, or reshaped"
        maker = next((op for op in reversed(graph.nodes) if value in op.outputs), None)
        if maker is None or not (maker.name in _PRODUCTS or _is_of_rows(graph, maker)):
            name = "an input" if maker is None else maker.name
            return f"{name} stands between the logits and the loss, and works on more than a row"
        found.append(maker)
    product = found[-1]
    if is_shared(product.outputs[0]):
        return "the logits are read by other ops than the loss"
    return tuple(op.id for op in reversed(found))


def _is_of_rows(graph: OperatorGraph, op: OpNode) -> bool:
    """Whether an op works on each row, or each logit, by itself, and leaves its place."""
    if op.name == "_log_softmax":
        return op.arguments[1] in (-1, len(graph.values[op.inputs[0]].shape) - 1)
    if len(op.inputs) != 1 or op.name.endswith("_"):
        return False
    return op.name in _VIEWS or op.name in _COPIES or (op.is_pointwise and not op.is_view)


def _parameter_names(graph: OperatorGraph, value: int, module: str) -> list[str]:
    """Names that a module has for the parameter that a value is."""
    storage = graph.values[value].storage
    if graph.storages[storage].kind is not StorageKind.PARAMETER:
        return []
    names = [name for each in graph.parameters if each.storage == storage for name in each.names]
    return [name for name in names if name.rpartition(".")[0] == module][:1]
