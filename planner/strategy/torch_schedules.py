"""Private torch API: the action lists of torch's pipeline schedules.

``torch.distributed.pipelining._schedule_visualizer`` is the only place that makes the action
list of a schedule without process groups. Nothing else in the program imports it.
"""

Actions = tuple[tuple[int, bool], ...]
"""Actions of one rank in order: (stage, True for a forward, False for a full backward)."""


def interleaved_actions(
    *, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[Actions, ...]:
    """Action list of every rank under Interleaved1F1B.

    Args:
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_microbatches: Microbatches per step.

    Returns:
        One list per rank, idle slots left out.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    table = get_schedule_ops("Interleaved1F1B", pp, num_microbatches, virtual_stages)
    return tuple(
        tuple(
            (action.stage_index, action.computation_type.value == "F")
            for action in row
            if action is not None and action.computation_type.value in ("F", "B")
        )
        for row in table
    )
