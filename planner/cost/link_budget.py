"""What data-parallel traffic of a unit hides behind its compute: one budget of link time.

While a pass of a unit runs, the data-parallel link can move as much as the pass lasts: its
kernels (recomputation among them, during which FSDP2 prefetches as well) and the tensor-parallel
collectives that it waits for. Parameter gathers, gradient scatters and the replicas' all-reduce of
the unit share this time, and so do tensor-parallel collectives where they cross the same link:

    exposed = min(traffic, max(0, traffic + collectives on the link - window))

Neighbouring units are taken to be alike: what hides behind a unit is its own traffic, so that its
price does not depend on where a stage is cut, and sums over units are additive.
"""

from collections.abc import Sequence
from itertools import compress
from operator import add

from planner.cost.unit_pricing import Beside, PricedUnit
from planner.framework.spec import FrameworkSpec
from planner.strategy.mesh import BESIDE
from planner.vocabulary import Axis


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
        beside_share_link: Sequence[bool] = (False,) * len(BESIDE),
        hides: bool = True,
    ) -> None:
        """Keep the framework's overlap.

        Args:
            framework: How much of its collectives and reductions it hides.
            tp_shares_link: Data-parallel traffic crosses a link of the tensor-parallel group.
            beside_share_link: It crosses one of each axis beside that (``BESIDE``).
            hides: Whether traffic runs beside compute at all.
        """
        self.key = (framework, tp_shares_link, tuple(beside_share_link), hides)
        """Passes with equal keys are alike."""
        self._hides = hides
        self._exposed = 1 - framework.tp_overlap
        self._beside_weights = framework.hides_backward_collectives
        self._reducing = framework.gradient_overlap
        self._shares = tp_shares_link
        self._beside_share = beside_share_link

    def busy_s(self, comm_s: float, beside_s: Beside) -> float:
        """Collectives of a pass that cross a link of data-parallel traffic.

        Args:
            comm_s: All of them.
            beside_s: Those of them over the axes beside the split one.
        """
        busy = compress(beside_s, self._beside_share)
        return sum(busy, comm_s - sum(beside_s) if self._shares else 0.0)

    def beside_comm_s(self, unit: PricedUnit, axis: Axis) -> float:
        """What of the exposed collectives is over an axis beside the split one."""
        at, exposed = BESIDE.index(axis), 0.0
        for comm_s, beside_s, exposed_comm_s in (
            (unit.forward_comm_s, unit.forward_beside_s[at], self.forward_comm_s(unit)),
            (unit.backward_comm_s, unit.backward_beside_s[at], self.backward_comm_s(unit)),
        ):
            exposed += exposed_comm_s * beside_s / comm_s if beside_s else 0.0
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
            busy_s=self.busy_s(unit.forward_comm_s, unit.forward_beside_s),
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
            tuple(map(add, unit.backward_beside_s, again.beside_comm_s)),
        )
        window_s = unit.backward_s + self.backward_comm_s(unit) + self.recompute_s(unit, kind)
        return max(
            exposed_s(gathers_s + reductions_s, busy_s=busy_s, window_s=window_s),
            exposed_s(reductions_s, busy_s=busy_s, window_s=self._reducing * window_s),
        )
