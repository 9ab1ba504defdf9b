"""What data-parallel traffic of a unit hides behind its compute: one budget of link time.

While a pass of a unit runs, the data-parallel link can move as much as the pass lasts: its
kernels (recomputation among them, during which FSDP2 prefetches as well) and the tensor-parallel
collectives that it waits for. Parameter gathers, gradient scatters and the replicas' all-reduce of
the unit share this time, and so do tensor-parallel collectives where they cross the same link:

    exposed = min(traffic, max(0, traffic + collectives on the link - window))

Neighbouring units are taken to be alike: what hides behind a unit is its own traffic, so that its
price does not depend on where a stage is cut, and sums over units are additive.
"""

from planner.cost.unit_pricing import PricedUnit
from planner.framework.spec import FrameworkSpec


def exposed_s(traffic_s: float, *, busy_s: float, window_s: float) -> float:
    """Seconds of some traffic that a window does not hide.

    Args:
        traffic_s: The traffic.
        busy_s: Other traffic on the same link.
        window_s: Time for both.
    """
    return min(traffic_s, max(0.0, traffic_s + busy_s - window_s))


class UnitPasses:
    """The passes of a unit: what they wait for, and what hides behind them."""

    def __init__(
        self,
        framework: FrameworkSpec,
        *,
        tp_shares_link: bool,
        second_shares_link: bool = False,
        hides: bool = True,
    ) -> None:
        """Keep the framework's overlap.

        Args:
            framework: How much of its collectives and reductions it hides.
            tp_shares_link: Data-parallel traffic crosses a link of the tensor-parallel group.
            second_shares_link: It crosses one of the second axis (``second_axis``).
            hides: Whether traffic runs beside compute at all.
        """
        self.key = (framework, tp_shares_link, second_shares_link, hides)
        """Passes with equal keys are alike."""
        self._hides = hides
        self._exposed = 1 - framework.tp_overlap
        self._beside_weights = framework.hides_backward_collectives
        self._reducing = framework.gradient_overlap
        self._shares = tp_shares_link
        self._second_share = second_shares_link

    def busy_s(self, comm_s: float, second_s: float) -> float:
        """Collectives of a pass that cross a link of data-parallel traffic.

        Args:
            comm_s: All of them.
            second_s: Those of them over the second axis.
        """
        others_s = comm_s - second_s if self._shares else 0.0
        return others_s + (second_s if self._second_share else 0.0)

    def second_comm_s(self, unit: PricedUnit) -> float:
        """What of the exposed collectives is over the second axis."""
        exposed = 0.0
        for comm_s, second_s, exposed_comm_s in (
            (unit.forward_comm_s, unit.forward_second_comm_s, self.forward_comm_s(unit)),
            (unit.backward_comm_s, unit.backward_second_comm_s, self.backward_comm_s(unit)),
        ):
            exposed += exposed_comm_s * second_s / comm_s if second_s else 0.0
        return exposed

    def forward_comm_s(self, unit: PricedUnit) -> float:
        """Exposed tensor-parallel collectives of the forward pass."""
        return unit.forward_comm_s * self._exposed

    def backward_comm_s(self, unit: PricedUnit) -> float:
        """Exposed tensor-parallel collectives of the backward pass."""
        comm_s = unit.backward_comm_s
        if self._beside_weights:
            comm_s = max(0.0, comm_s - unit.weight_backward_s)
        return comm_s * self._exposed

    def recompute_s(self, unit: PricedUnit, kind: str) -> float:
        """Recomputation with its exposed collectives."""
        again = unit.recompute[kind]
        return again.compute_s + again.comm_s * self._exposed

    def forward_exposed_s(self, unit: PricedUnit, gathers_s: float) -> float:
        """What of some gathers the forward pass does not hide."""
        if not self._hides:
            return gathers_s
        return exposed_s(
            gathers_s,
            busy_s=self.busy_s(unit.forward_comm_s, unit.forward_second_comm_s),
            window_s=unit.forward_s + self.forward_comm_s(unit),
        )

    def backward_exposed_s(
        self, unit: PricedUnit, kind: str, *, gathers_s: float, reductions_s: float
    ) -> float:
        """What of some gathers and reductions the backward pass does not hide.

        Args:
            unit: The unit.
            kind: Its recomputation, which is part of the pass.
            gathers_s: Gathers of parameters.
            reductions_s: Reductions of gradients, which have a share of the pass.
        """
        if not self._hides:
            return gathers_s + reductions_s
        again = unit.recompute[kind]
        busy_s = self.busy_s(
            unit.backward_comm_s + again.comm_s,
            unit.backward_second_comm_s + again.second_comm_s,
        )
        window_s = unit.backward_s + self.backward_comm_s(unit) + self.recompute_s(unit, kind)
        return max(
            exposed_s(gathers_s + reductions_s, busy_s=busy_s, window_s=window_s),
            exposed_s(reductions_s, busy_s=busy_s, window_s=self._reducing * window_s),
        )
