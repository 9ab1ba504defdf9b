"""Rules of what a model does with its parameters that neither FSDP2 nor the optimiser holds."""

from planner.strategy.facts import ModelFacts
from planner.strategy.rules import BrokenRule


def changed_rule(facts: ModelFacts, *, is_plain: bool) -> BrokenRule | None:
    """Refuse what would lose a parameter's change: FSDP2 makes it again from what ranks hold.

    Args:
        facts: The model's.
        is_plain: Parameters are held as they are, by one rank and in the compute dtype.
    """
    if is_plain or not facts.changed_parameters:
        return None
    return BrokenRule(
        rule="forward changes parameters",
        detail=f"forward writes into the parameter {_first_of(facts.changed_parameters)}"
        ", which is lost where FSDP2 holds parameters (several ranks share or split them, or "
        "they are cast to bfloat16); one device with --dtype float32 runs it, and anywhere a "
        "model that keeps such state in buffers (register_buffer) does",
    )


OF_ANY_LAYOUT = "complex parameters"
"""Name of the rule that no layout keeps."""


def complex_rule(facts: ModelFacts) -> BrokenRule | None:
    """Refuse complex parameters: fused AdamW takes none, and FSDP2 casts them to real ones."""
    if not facts.complex_parameters:
        return None
    return BrokenRule(
        rule=OF_ANY_LAYOUT,
        detail=f"parameters are complex numbers ({_first_of(facts.complex_parameters)}), which "
        "neither the fused optimiser nor FSDP2 takes; torch.view_as_real of one as the parameter "
        "and torch.view_as_complex of that in forward train alike (register_buffer where it is "
        "not trained)",
    )


def _first_of(names: tuple[str, ...]) -> str:
    more = len(names) - 1
    return names[0] + (f" and {more} more" if more else "")
