"""What frameworks that bring their own models, torchtitan and Megatron-LM, have in common."""

from collections.abc import Iterator

from planner.export.facts import block_lists, block_positions, whole_blocks
from planner.export.terms import Loss
from planner.plan.types import Plan
from planner.vocabulary import MESH_ORDER, Dtype


def model_losses(plan: Plan, framework: str) -> Iterator[Loss]:
    """Say what of the plan's model the framework's own models have not.

    They are one list of equal decoder blocks, split over tp by one rule.
    """
    lists = block_lists(plan)
    if len(lists) != 1:
        yield Loss(
            asked=f"blocks of {len(lists)} lists ({', '.join(lists) or 'none'})",
            instead=f"one list of blocks, which is what models of {framework} have",
        )
    if any(stage.carried for stage in plan.stages):
        yield Loss(
            asked="stages that receive more than the stream from earlier ones",
            instead=f"the stream alone, which is what stages of {framework} send",
        )
    if whole := whole_blocks(plan):
        yield Loss(
            asked=f"{whole} of {len(block_positions(plan))} blocks whole on each of "
            f"{plan.degrees.tp} tensor-parallel ranks",
            instead=f"all of them split, by the rule of {framework}",
        )
    yield from dtype_losses(plan)


def dtype_losses(plan: Plan) -> Iterator[Loss]:
    """Float64 is for tests of the script alone."""
    if plan.dtype == Dtype.FLOAT64:
        yield Loss(asked="float64", instead="float32")


def chunk_losses(plan: Plan) -> Iterator[Loss]:
    """A loss in chunks, for a target whose file does not say how it is taken."""
    if plan.loss_chunks > 1:
        yield Loss(
            asked=f"a loss in {plan.loss_chunks} chunks of rows, without which more memory is "
            "needed than the plan says",
            instead="the loss as the target or your code takes it",
        )


def offload_losses(plan: Plan) -> Iterator[Loss]:
    """States in host memory, for a target that has no such thing as a whole."""
    if plan.cpu_offload:
        yield Loss(
            asked="parameters, gradients and optimiser states in host memory, without which more "
            "of the device's is needed than the plan says",
            instead="all of them on the device",
        )


def input_losses(plan: Plan) -> Iterator[Loss]:
    """Inputs of blocks in host memory, for a target whose file does not say where they lie."""
    if plan.keeps_inputs_on_host:
        yield Loss(
            asked="inputs of blocks that are recomputed in full in host memory, without which "
            "more of the device's is needed than the plan says",
            instead="what the target or your code keeps of them, on the device",
        )


def order_losses(plan: Plan) -> Iterator[Loss]:
    """Axes that lie around one another in another order than those of the target."""
    axes = plan.nested_axes
    usual = [axis for axis in MESH_ORDER if axis in axes]
    if list(axes) != usual:
        yield Loss(
            asked=f"ranks in the order {' around '.join(axes)}",
            instead=f"{' around '.join(usual)}, over other links",
        )


def float8_losses(plan: Plan) -> Iterator[Loss]:
    """Products in float8, for a target whose file does not say what multiplies in it."""
    if plan.float8:
        yield Loss(
            asked="linear layers of blocks that multiply in float8",
            instead=f"products in {plan.dtype}, unless the target or your code has them otherwise",
        )


def compile_losses(plan: Plan) -> Iterator[Loss]:
    """Compiled blocks, for a target whose file does not say what is compiled."""
    if plan.compile:
        yield Loss(
            asked="blocks run by torch.compile",
            instead="blocks as the target or your code runs them",
        )
