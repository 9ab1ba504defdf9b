"""What a script answers where it looks at the model without data."""

from planner.codegen.source import call_of, quote, wrapped_tuple
from planner.plan.types import Plan


def looks_at_model(plan: Plan) -> bool:
    """Say whether the script runs the model on the meta device first."""
    return plan.degrees.pp > 1 or plan.degrees.splits_modules


def chooses_parameters(plan: Plan) -> bool:
    """Say whether ranks may use different parameters: their code goes by the data of samples."""
    return bool(plan.data_reads) and plan.degrees.dp > 1


def read_sources(plan: Plan) -> list[str]:
    """Write what the model reads there, nothing where the script does not look."""
    reads = plan.data_reads if looks_at_model(plan) else ()
    found = []
    for read in reads:
        pairs = [f"({a!r}, {n})" for a, n in zip(read.answers, read.repeats, strict=True)]
        answers = wrapped_tuple(pairs, column=8, indent=8)
        found.append(call_of("DataRead", [quote(read.file), str(read.line), answers], indent=4))
    return found
