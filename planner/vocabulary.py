"""The words that plans, requests, scripts and tables share, each written once."""

from enum import StrEnum
from typing import Literal


class _Word(StrEnum):
    """A string with a name; it is shown and written as the string that it is."""

    __repr__ = str.__repr__


class Axis(_Word):
    """Mesh axes, in the words of torch and TorchTitan."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    TP = "tp"
    CP = "cp"
    PP = "pp"
    EP = "ep"


MESH_ORDER: tuple[str, ...] = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes from outermost to innermost: neighbours on tp and cp sit in one node, stages in different
ones."""

ORDER_SIGN = "-"
"""Between the axes of an order, the outermost first: "dp_replicate-pp"."""

PLANNED_AXES: tuple[str, ...] = (
    Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP, Axis.PP, Axis.EP
)  # fmt: skip
"""Axes whose degrees are decided, as they are listed."""

MODEL_AXES: tuple[Axis, ...] = (Axis.TP, Axis.CP, Axis.PP, Axis.EP)
"""Axes that divide the model or a sample: the others give each rank samples of its own."""


class Schedule(_Word):
    """Orders of a pipeline's microbatches, as ``get_schedule_class`` of torch names them.

    The last two are of Qi et al. 2024 (2401.10241), and no script runs them.
    """

    NONE = "none"
    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED = "Interleaved1F1B"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZBV = "ZBVZeroBubble"
    DUAL_PIPE_V = "DualPipeV"
    ZB_1P = "ZB-1p"
    ZB_2P = "ZB-2p"


UNASKED_SCHEDULES: tuple[str, ...] = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
"""Schedules that are planned unasked."""

ZERO_BUBBLE_SCHEDULES: tuple[str, ...] = (
    Schedule.INTERLEAVED_ZERO_BUBBLE, Schedule.ZBV, Schedule.DUAL_PIPE_V
)  # fmt: skip
"""Schedules of torch that may run a backward in two parts: the one that the stage before waits
for, and the one that only parameters' gradients need."""

V_SCHEDULES: tuple[str, ...] = (Schedule.ZBV, Schedule.DUAL_PIPE_V)
"""Schedules of which a rank holds two stages: the first rank has the first and the last."""

SHARED_SCHEDULES: tuple[str, ...] = (Schedule.INTERLEAVED, *ZERO_BUBBLE_SCHEDULES)
"""Schedules of which a rank holds several stages."""

PLANNED_SCHEDULES: tuple[str, ...] = (*UNASKED_SCHEDULES, *ZERO_BUBBLE_SCHEDULES)
"""Schedules that are planned; ``Schedule.NONE`` is that of no pipeline."""


class Recomputation(_Word):
    """What of a block's activations backward computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    EVERY_OTHER_LAYER = "every_other_layer"
    """In full of the first, third, fifth block, none of the others: in other frameworks alone."""


RECOMPUTATIONS: tuple[str, ...] = (Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL)
"""Recomputation that one block can have, by falling memory and rising work."""


class WorkKind(_Word):
    """Kinds of ops that do a model's FLOPs, each priced by a formula of its own."""

    PRODUCTS = "matrix products"
    ATTENTION = "fused attention"
    GROUPED = "grouped products"
    CONVOLUTION = "convolutions"
    RECURRENCE = "recurrences"


class Style(_Word):
    """How a module that owns parameters runs under tensor or context parallelism."""

    COLUMN = "column"
    """Its weight is split over output features."""
    ROW = "row"
    """Its weight is split over input features."""
    VOCAB_EMBEDDING = "vocab_embedding"
    """The rows of its table are split."""
    INNER = "inner"
    """Its parameters are split along dims of products inside it: it reads its inputs whole, and
    its output is a sum over ranks."""
    REPLICATE = "replicate"
    """Its parameters are whole on each rank; layouts of input and output change as stated."""
    ON_PART = "on_part"
    """Its parameters are whole, and it runs on a part of its input (of the sequence, or of the
    heads), so that their gradients are sums over the ranks: over tp after backward, over cp with
    the reduction of data parallelism."""
    EXPERTS = "experts"
    """Each rank of ep has some of its experts, and runs them on the tokens that all ranks send: of
    those that ranks of tp have in common, each sends its part."""


SPLIT_STYLES: tuple[str, ...] = (Style.COLUMN, Style.ROW, Style.VOCAB_EMBEDDING, Style.INNER)
"""Styles that split parameters."""


_STYLES_OF: dict[Axis, tuple[str, ...]] = {
    Axis.TP: (*SPLIT_STYLES, Style.EXPERTS),
    Axis.CP: (Style.ON_PART, Style.EXPERTS),
    Axis.EP: (Style.EXPERTS,),
}


def split_styles(axis: Axis) -> tuple[str, ...]:
    """Styles that split a module over an axis.

    Its parameters over tp, what it reads over cp, its experts over ep (with or without these).
    """
    return _STYLES_OF[axis]


class Dtype(_Word):
    """Compute dtypes, as torch spells them without the prefix."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


COMPUTE_DTYPES: tuple[str, ...] = (Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT64)
"""Dtypes that the script can compute in; float16 would need loss scaling, which it has not."""

Operands = Literal["even", "strided", "cast"]
"""What a kernel that goes element by element finds: operands of one dtype that lie alike in memory,
others of one dtype, or some of several dtypes."""
