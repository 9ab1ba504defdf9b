"""Plans made by hand, in the vocabulary that the search uses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.graph.operator_graph import ModuleOutput
from planner.plan.types import ModelRef, Plan, StagePlan
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.schedules import rank_of_stage
from planner.strategy.sharding import ModuleSharding, SplitParameter, UnitSharding
from planner.vocabulary import MESH_ORDER

EXAMPLES = Path(__file__).parents[2] / "examples"

NO_MEMORY = MemoryBreakdown(
    params_bytes=0,
    grads_bytes=0,
    optimizer_bytes=0,
    activations_bytes=0,
    buffers_bytes=0,
    temporary_bytes=0,
    reserve_bytes=0,
)
NO_COSTS = CostBreakdown(
    compute_s=0.01,
    recompute_s=0.0,
    tp_comm_s=0.0,
    pp_comm_s=0.0,
    dp_comm_s=0.0,
    bubble_s=0.0,
    optimizer_s=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What a stage receives beside the stream."""

    carried: tuple[ModuleOutput, ...] = ()
    stream_output: ModuleOutput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """An example model and how its modules are sharded over tp."""

    name: str
    file: Path
    blocks: tuple[str, ...]
    seq_len: int | None
    tied: tuple[tuple[str, ...], ...] = ()
    columns: tuple[tuple[str, int], ...] = ()
    """Module, fused projections."""
    has_biases: bool = False
    rows: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    embedding: str = ""
    head: str = ""
    crossings: Mapping[int, Crossing] = field(default_factory=dict)
    """What more than the stream crosses the cut before a unit."""

    @property
    def units(self):
        return ("prologue", *self.blocks, "epilogue")

    def split(self, dim):
        return (("weight", dim), *([("bias", 0)] if self.has_biases else []))

    def shardings(self, *, sequence_parallel):
        stream = "Shard(1)" if sequence_parallel else "Replicate"
        modules = [
            module_sharding(
                name, "column", split=self.split(0), output_layout="Shard(-1)", fused=fused
            )
            for name, fused in self.columns
        ]
        modules += [
            module_sharding(
                name, "row", split=(("weight", 1),), input_layout="Shard(-1)", output_layout=stream
            )
            for name in self.rows
        ]
        if sequence_parallel:
            modules += [
                module_sharding(name, "on_part", input_layout=stream, output_layout=stream)
                for name in self.norms
            ]
        last = len(self.units) - 1
        found = [UnitSharding(axis="tp", units=tuple(range(1, last)), modules=tuple(modules))]
        if self.embedding:
            embedding = module_sharding(self.embedding, "vocab_embedding", split=(("weight", 0),))
            found.append(UnitSharding(axis="tp", units=(0,), modules=(embedding,)))
        if self.head:
            head = module_sharding(
                self.head, "column", split=(("weight", 0),), output_layout="Shard(-1)"
            )
            found.append(UnitSharding(axis="tp", units=(last,), modules=(head,)))
        return tuple(found)


def module_sharding(
    module,
    style,
    *,
    input_layout="Replicate",
    output_layout="Replicate",
    split=(),
    fused=1,
):
    return ModuleSharding(
        module=module,
        style=style,
        input_layout=input_layout,
        output_layout=output_layout,
        split=tuple(SplitParameter(name=name, dim=dim, fused=fused) for name, dim in split),
    )


GPT = ModelCase(
    name="gpt",
    file=EXAMPLES / "gpt.py",
    blocks=tuple(f"transformer.h.{i}" for i in range(8)),
    seq_len=16,
    tied=(("transformer.wte.weight", "lm_head.weight"),),
    columns=(("attn.c_attn", 3), ("mlp.c_fc", 1)),
    has_biases=True,
    rows=("attn.c_proj", "mlp.c_proj"),
    norms=("ln_1", "ln_2"),
    embedding="transformer.wte",
    head="lm_head",
)
LLAMA = ModelCase(
    name="llama",
    file=EXAMPLES / "llama.py",
    blocks=tuple(f"layers.{i}" for i in range(8)),
    seq_len=16,
    columns=(
        ("attention.wq", 1),
        ("attention.wk", 1),
        ("attention.wv", 1),
        ("feed_forward.w1", 1),
        ("feed_forward.w3", 1),
    ),
    rows=("attention.wo", "feed_forward.w2"),
    norms=("attention_norm", "ffn_norm"),
    embedding="tok_embeddings",
    head="output",
)
SHALLOW_GPT = replace(
    GPT, name="shallow_gpt", file=Path(__file__).with_name("shallow_gpt.py"), blocks=GPT.blocks[:4]
)
SHALLOW_LLAMA = replace(
    LLAMA,
    name="shallow_llama",
    file=Path(__file__).with_name("shallow_llama.py"),
    blocks=LLAMA.blocks[:4],
)
MLP = ModelCase(
    name="mlp",
    file=EXAMPLES / "mlp.py",
    blocks=tuple(str(i) for i in range(13)),
    seq_len=None,
)


def make_plan(
    case,
    *,
    pp=1,
    dp_replicate=1,
    dp_shard=1,
    cp=1,
    ep=1,
    tp=1,
    mesh_order=MESH_ORDER,
    schedule="1F1B",
    virtual_stages=1,
    cuts=None,
    microbatch_size=2,
    global_batch_size=16,
    recompute="none",
    reshard_after_forward=True,
    sequence_parallel=False,
    dtype="float64",
    num_parameters=0,
):
    """Make a plan of an example model.

    Args:
        cuts: First unit of each stage but the first; None cuts evenly.
        recompute: One word for all blocks, or a tuple with one word per block.
    """
    degrees = ParallelDegrees(
        pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, ep=ep, tp=tp
    )
    num_units = len(case.units)
    num_stages = pp * virtual_stages
    if cuts is None:
        cuts = [1 + len(case.blocks) * i // num_stages for i in range(1, num_stages)]
    edges = [0, *cuts, num_units]
    words = (recompute,) * len(case.blocks) if isinstance(recompute, str) else recompute
    by_unit = ("none", *words, "none")
    crossings = [case.crossings.get(edge, Crossing()) for edge in edges]
    stages = tuple(
        StagePlan(
            index=i,
            pp_rank=rank_of_stage(schedule, i, pp),
            first_unit=edges[i],
            end_unit=edges[i + 1],
            activation_checkpointing=by_unit[edges[i] : edges[i + 1]],
            forward_s=0.001,
            backward_s=0.002,
            memory=NO_MEMORY,
            carried=crossings[i].carried,
            stream_output=crossings[i].stream_output,
        )
        for i in range(num_stages)
    )
    return Plan(
        model=ModelRef(
            file=str(case.file),
            module=None,
            factory="build_model",
            seq_len=case.seq_len,
            num_parameters=num_parameters,
        ),
        degrees=degrees,
        mesh_order=mesh_order,
        schedule=schedule if pp > 1 else "none",
        virtual_stages=virtual_stages,
        microbatch_size=microbatch_size,
        num_microbatches=global_batch_size // degrees.dp // microbatch_size,
        global_batch_size=global_batch_size,
        dtype=dtype,
        reshard_after_forward=reshard_after_forward,
        sequence_parallel=sequence_parallel,
        sequence_dim=1,
        units=case.units,
        tied_parameters=case.tied,
        shardings=case.shardings(sequence_parallel=sequence_parallel) if tp > 1 else (),
        stages=stages,
        memory_by_rank=(NO_MEMORY,) * pp,
        costs=NO_COSTS,
        tokens_per_step=global_batch_size * (case.seq_len or 1),
        flop_per_step=1,
    )
