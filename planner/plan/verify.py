"""Every plan is verified: after the search, when it is read, and before anything is written.

The rules, in the order in which they are held; the first that is broken is reported.

* of the layout: units, degrees, mesh, batch, schedule, stages, pipeline ranks, recomputation,
  split modules, whole modules, sharded units, sharded modules, layouts, fused projections, tied
  parameters, crossings, loss, offload;
* of the prices: numbers, idle parts, rank memories;
* on the cluster: busy time, bubble, devices, kinds of device, float8, memory, host memory, reserve,
  MFU;
* beside the model: model's units, model's ties, model's cuts, model's modules, model's sizes,
  model's work, model's loss;
* of the search: fastest first, same training, bound, objective, status, baseline. Its price is
  the last one: ``planner.pricing.reprice`` makes it again from scratch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVarTuple

from planner.errors import VerificationError
from planner.hardware.spec import ClusterSpec
from planner.plan.layout_rules import LAYOUT_RULES
from planner.plan.model_rules import MODEL_RULES
from planner.plan.price_rules import (
    CLUSTER_RULES,
    OPEN_RULES,
    OUTCOME_RULES,
    PRICE_RULES,
    PROOF_RULES,
)
from planner.plan.types import Plan, SearchOutcome, SolverReport

if TYPE_CHECKING:
    from planner.graph.sizes.family import GraphFamily

Subject = TypeVarTuple("Subject")

REPORT = (
    "this is a bug of the planner: please report it with this message, the command (or the call) "
    "and the model"
)
"""What to do about a broken rule."""


def verify_layout(plan: Plan) -> None:
    """Hold a plan to what its script is made of; prices are left alone.

    Raises:
        VerificationError: For the first rule that is broken.
    """
    _hold(LAYOUT_RULES, "the plan", REPORT, plan)


def verify_plan(
    plan: Plan,
    cluster: ClusterSpec,
    *,
    graphs: "GraphFamily | None" = None,
    name: str = "the plan",
    hint: str = REPORT,
) -> None:
    """Hold a plan to every rule that it can be held to by itself.

    Args:
        plan: What is verified.
        cluster: What it was planned for.
        graphs: Its model, where it is at hand.
        name: How to call the plan in the message.
        hint: What to do about it.

    Raises:
        VerificationError: For the first rule that is broken.
    """
    _hold(LAYOUT_RULES, name, hint, plan)
    _hold(PRICE_RULES, name, hint, plan)
    _hold(CLUSTER_RULES, name, hint, plan, cluster)
    if graphs is not None:
        _hold(MODEL_RULES, name, hint, plan, graphs)


def verify_proof(
    solver: SolverReport, best: Plan, *, name: str = "the proof", hint: str = REPORT
) -> None:
    """Hold what the solver reports to the best plan.

    Raises:
        VerificationError: For the first rule that is broken.
    """
    _hold(PROOF_RULES, name, hint, solver, best)


def verify_outcome(
    outcome: SearchOutcome,
    cluster: ClusterSpec,
    *,
    graphs: "GraphFamily | None" = None,
    is_open: bool = False,
) -> None:
    """Hold all plans of a search to the rules, each by itself and all together.

    Args:
        outcome: What was found.
        cluster: For what machine.
        graphs: The model, where it is at hand.
        is_open: Whether the request fixed no value, so that the rule of thumb is in the set.

    Raises:
        VerificationError: For the first rule that is broken.
    """
    verify_plan(outcome.best, cluster, graphs=graphs, name="the best plan")
    for place, plan in enumerate(outcome.candidates):
        verify_plan(plan, cluster, graphs=graphs, name=f"candidate {place}")
    if outcome.rule_of_thumb is not None:
        verify_plan(outcome.rule_of_thumb, cluster, graphs=graphs, name="the rule of thumb")
    _hold(OUTCOME_RULES, "the search", REPORT, outcome)
    verify_proof(outcome.solver, outcome.best)
    if is_open:
        _hold(OPEN_RULES, "the search", REPORT, outcome)


def _hold(
    rules: Mapping[str, Callable[[*Subject], Iterator[str]]],
    name: str,
    hint: str,
    *subject: *Subject,
) -> None:
    """Hold a subject to some rules.

    Raises:
        VerificationError: For the first violation.
    """
    for rule, violations in rules.items():
        for violation in violations(*subject):
            raise VerificationError(
                f"{name} breaks the rule {rule!r}: {violation}", rule=rule, hint=hint
            )
