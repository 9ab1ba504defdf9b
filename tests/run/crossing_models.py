"""Models whose stages hand over more than one tensor, and what crosses each of their cuts."""

from pathlib import Path

from example_plans import Crossing, ModelCase

from planner.graph.operator_graph import ModuleOutput

ZOO = Path(__file__).parents[1] / "graph" / "zoo"


def first_of(*modules):
    return tuple(ModuleOutput(module=module, index=0) for module in modules)


def unet_crossings():
    """Skips are made from the stem (unit 0) to the end of the way down, and read in reverse."""
    makers = ("conv_in", *(f"down.{i}" for i in range(5)))
    first_up = 8
    reader = {maker: first_up + i for i, maker in enumerate(reversed(makers))}
    crossings = {}
    for unit in range(1, first_up + len(makers)):
        made = makers[:unit]
        stream = makers[unit - 1] if unit <= len(makers) else None
        # The next block reads the stream; up.0 reads a skip as its second argument.
        carried = [maker for maker in made if reader[maker] >= unit and maker != stream]
        crossings[unit] = Crossing(
            carried=first_of(*carried, "time", "pooled"),
            stream_output=first_of(stream)[0] if stream else None,
        )
    return crossings


UNET = ModelCase(
    name="unet",
    file=ZOO / "unet.py",
    blocks=(
        *(f"down.{i}" for i in range(5)),
        *(f"middle.{i}" for i in range(2)),
        *(f"up.{i}" for i in range(6)),
    ),
    seq_len=None,
    crossings=unet_crossings(),
)
DIT = ModelCase(
    name="dit",
    file=ZOO / "dit.py",
    blocks=tuple(f"blocks.{i}" for i in range(4)),
    seq_len=None,
    columns=(("fc1", 1),),
    has_biases=True,
    rows=("fc2",),
    crossings=dict.fromkeys(range(1, 6), Crossing(carried=first_of("time", "classes"))),
)
T5 = ModelCase(
    name="t5",
    file=ZOO / "t5.py",
    blocks=tuple(f"{half}.{i}" for half in ("encoder", "decoder") for i in range(3)),
    seq_len=16,
    crossings={
        **dict.fromkeys(range(1, 4), Crossing(carried=first_of("encoder_bias"))),
        **dict.fromkeys(range(4, 7), Crossing(carried=first_of("encoder_norm", "decoder_bias"))),
    },
)
TUPLES = ModelCase(
    name="tuples",
    file=Path(__file__).with_name("tuple_blocks.py"),
    blocks=tuple(f"blocks.{i}" for i in range(5)),
    seq_len=None,
    crossings={
        1: Crossing(carried=first_of("time", "label")),
        **dict.fromkeys(
            range(2, 6),
            Crossing(
                carried=(*first_of("label", "time"), ModuleOutput(module="blocks.0", index=1))
            ),
        ),
    },
)
LORA = ModelCase(
    name="lora",
    file=ZOO / "lora.py",
    blocks=tuple(f"layers.{i}" for i in range(4)),
    seq_len=16,
)
