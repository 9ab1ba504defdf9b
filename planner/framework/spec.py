"""What the cost model knows of a training framework: a few physical choices, as data.

The cost model describes the emitted script. Runs of other frameworks, which it is validated
against, differ by what stands here alone; what is reached of devices and links belongs to these
(``planner.framework.constants``). The values come from ``profiles/frameworks/*.toml``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.hardware.spec import NumberSource

Attention = Literal["fused", "unfused"]
"""One kernel that never writes the scores, or matmul, softmax, matmul with the scores kept."""

SelectiveRecomputation = Literal["matmul_outputs", "every_second_matmul", "attention"]
"""Everything but the outputs of matmuls and fused attention is computed again (torch), every
second matmul of a block as well (torchtitan's "op"), or the scores of unfused attention alone
(Korthikanti et al. 2022)."""

Pointwise = Literal["as_written", "by_hand", "compiled"]
"""Every pointwise op is a kernel; or chains of them are one kernel each, and norms one of their
own (Megatron-LM's bias-GELU and bias-dropout-add); or norms join the chains (torch.compile)."""

ModelCode = Literal["fused_kernels", "plain_torch"]
"""Norms and rotary positions are one kernel each and neighbouring projections one matmul; or all
of it is written in plain torch, several kernels each (torchtitan)."""

StateForm = Literal["fsdp", "replicated", "plain"]
"""Parameters are gathered from shards (FSDP2), every rank holds them (DDP, ZeRO-1), or the one that
has them alone does (emitted scripts, where no dtype is changed)."""

StageCuts = Literal["even_blocks", "even_with_ends", "by_flop"]
"""Blocks are divided evenly; embedding and head count as a block each; or a stage ends with the
block that exceeds its share of the matmul FLOPs, the head's included (nanotron)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForms:
    """How a framework computes what a model asks for."""

    attention: Attention = "fused"
    """Fused or unfused attention."""
    attention_dropout: bool = False
    """Unfused attention keeps a dropout mask as well."""
    selective: SelectiveRecomputation = "matmul_outputs"
    """What selective recomputation keeps."""
    keeps_gathered_inputs: bool = True
    """A split stream that is gathered for a projection stays gathered until backward, as with
    torch's sequence parallelism; otherwise it is gathered again (Korthikanti et al. 2022)."""
    splits_transfers: bool = False
    """Each tensor-parallel rank sends its share of a stage's output, which the receiving node
    gathers again over its faster links (Narayanan et al. 2021, section 4.1); otherwise each
    sends all of it."""
    recompute_stops_early: bool = True
    """Recomputation ends with the last tensor that backward needs, as torch's checkpoint does;
    otherwise the block's whole forward runs again."""
    pointwise: Pointwise = "as_written"
    """Which pointwise ops and norms of a block are one kernel."""
    float8: bool = False
    """Linear layers of blocks multiply in float8."""
    keeps_inputs_on_host: bool = False
    """The input of a block that is recomputed in full lies in host memory until its backward."""
    rounds_by_hand: bool = False
    """What they multiply is rounded by one kernel (Transformer Engine's), not by several of torch,
    which are one where pointwise ops are compiled."""
    copies_operands: bool = False
    """What collectives of split modules carry is put in order by copies, where a split dim is not
    the first, and what they sum is a copy (torch); otherwise the sequence is the first dim and sums
    are made in place (Megatron-LM)."""
    gathers_float8: bool = False
    """Where the stream is split, ranks round their parts of what such layers multiply before they
    gather it, once for all that read it (torchao's float8 tensor parallelism)."""
    fuses_loss: bool = False
    """Cross-entropy is one kernel that reads the logits, and one that writes their gradient."""
    wired_layouts: bool = True
    """Tensor parallelism is the column-row pattern of Shoeybi et al. 2019 (1909.08053) whatever
    it costs; otherwise layouts inside a block are those that the planner chooses."""
    loss_apart: bool = False
    """A pipeline stage may hold the loss alone, so that logits cross a cut; otherwise it belongs
    to the epilogue."""
    splits_loss_in_place: bool = False
    """Over a split vocabulary the gradient of the logits is made in what forward kept, as
    Megatron-LM does; torch's loss_parallel makes three tensors of their size beside it."""


TORCH_KERNELS = KernelForms()
"""Those of the emitted script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a rank holds."""

    gradient: float
    """Gradients, as accumulated."""
    optimizer: float
    """Master weights and moments, before ZeRO divides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMatch:
    """Which rows of a table of runs a profile is for."""

    framework: str
    """The row's framework column."""
    source: str
    """What the row's source column contains, "" for anything."""
    notes: str
    """What the row's notes column contains, "" for anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSpec:
    """One framework as some runs used it."""

    name: str
    """Name of the profile: "nanotron"."""
    kernels: KernelForms
    """How it computes."""
    model_code: ModelCode
    """How its models are written."""
    dropout: float
    """Dropout of attention weights and residual branches."""
    state_form: StateForm
    """How data parallelism holds the parameters."""
    state: StateBytes
    """What a rank holds per parameter besides itself where the form is "replicated"."""
    gradient_wire_bytes: float
    """Bytes per parameter of the gradient reduction."""
    broadcasts_shards: bool
    """With ZeRO-1, every rank sends the parameters that it updated to all others in turn."""
    bucket_bytes: float
    """Bytes that one collective of the gradient reduction, or of ZeRO-1's gather, moves where the
    form is "replicated"; infinite otherwise."""
    gradient_overlap: float
    """Share of the last microbatch's backward behind which the reduction hides."""
    tp_overlap: float
    """Share of tensor-parallel collectives that hides behind the matmuls beside them."""
    hides_backward_collectives: bool
    """Tensor-parallel collectives of the backward pass run beside the matmuls that make the
    gradients of parameters (Megatron-LM since 2022)."""
    host_dispatch_s: float
    """Time that its code takes to issue one op on the hosts of AWS p5 (AMD EPYC 7R13)."""
    launch_wait_s: float
    """Time that a device waits for its host after each kernel, where launches block
    (CUDA_LAUNCH_BLOCKING=1)."""
    newest_attention: bool
    """Fused attention runs by the fastest kernels there are (on Hopper cuDNN's, which torch takes
    since 2.5), and not by FlashAttention-2. Where it does not, what pointwise kernels take beyond
    their bytes is in the other constants, which were fitted so."""
    attention_share: float
    """Share of the device's rate of fused attention that its kernels reach, where they are older
    or add biases."""
    split_host_share: float
    """What an op on parts of tensors takes the host beyond one on whole ones, relative to that."""
    selective_host_share: float
    """What an op takes it beyond that in forward and recomputation of a block that is recomputed
    selectively, relative to one outside."""
    collective_host_s: float
    """Time that the host takes to issue one tensor-parallel collective, beyond that of any op."""
    issues_by_rank: bool
    """Where stages exchange activations between nodes, the host takes the time of a collective
    once more for every rank of the group, as if they issued it in turn."""
    stage_cuts: StageCuts
    """How blocks are divided over stages."""
    default_vocab_size: int
    """Vocabulary where a row states none."""
    default_heads: int
    """Query heads where a row states none; 0 for heads of 128 elements."""
    message_s: float
    """Time of a tensor that one stage hands to another beyond the link's: handshake and
    synchronisation."""
    congested_nodes: float
    """Nodes from which on exchanges between stages are stalled by the network; infinite where
    they never are."""
    congested_message_s: float
    """Time of such a tensor in these jobs, whatever its size."""
    step_s: float
    """Time of a step beyond its microbatches, reductions and optimiser."""
    optimizer_moved_bytes: float
    """Bytes that clipping and the optimiser move per parameter of a rank's share."""
    accumulated_bytes: float
    """Bytes that adding a microbatch's gradients moves per parameter, beyond writing them."""
    measures_first_rank: bool
    """The runs state the memory of the first rank, not of the fullest."""
    unusable_bytes: float
    """Memory of a device that such runs cannot fill: what they hold beyond the memory they
    state, fragmentation included."""
    reserve_bytes: float | None
    """Memory beyond what is counted: context, communicators, workspaces, as the runs measured
    memory; None for the device's."""
    holds_gradient_shards: bool
    """FSDP: memory counts as the allocator holds it, by stream, so that shards of gradients lie
    beside the activations of the backward that makes them; otherwise as tensors live."""
    splits_backward: bool
    """Its schedules may put off the part of a backward that only parameters' gradients need
    (ZB-1p and ZB-2p of Qi et al. 2024)."""
    uncalibrated_error: float | None
    """Mean error of step times on clusters without runs, as a share: what leaving out one cluster
    after the other from the fit shows; None where nobody has looked."""
    matches: tuple[RunMatch, ...]
    """Runs that this profile is for."""
    numbers: Mapping[str, NumberSource] = field(hash=False, repr=False)
    """Provenance and source of every number, by its key in the profile file."""
