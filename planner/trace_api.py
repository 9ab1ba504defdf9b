"""The library: ``planner.trace`` and ``planner.trace_lengths``."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from planner.graph.loading.hints import make_hints
from planner.model_argument import load_argument, model_argument, model_words
from planner.progress import ProgressCallback, timed_phase
from planner.request_rules import check_trace
from planner.trace_result import TracedLengths, TraceResult
from planner.vocabulary import Dtype

if TYPE_CHECKING:
    from torch import Tensor, nn


def trace(
    model: "str | nn.Module | Callable[[], nn.Module]",
    *,
    microbatch_size: int = 1,
    seq_len: int | None = None,
    dtype: str = Dtype.BFLOAT16,
    example_batch: Callable[..., Any] | None = None,
    loss_fn: "Callable[[Any, Any], Tensor] | None" = None,
    hints: Mapping[str, bool | int | float] | None = None,
    progress: ProgressCallback | None = None,
) -> TraceResult:
    """Trace one training step of a model, forward and backward, without its weights.

    Args:
        model: As for ``plan``.
        microbatch_size: Samples in the microbatch.
        seq_len: Tokens per sample, None for the model's own.
        dtype: Compute dtype: "bfloat16", "float32" or "float64".
        example_batch: As for ``plan``.
        loss_fn: As for ``plan``.
        hints: As for ``plan``.
        progress: Called when a phase begins, is under way and ends, None for silence.

    Returns:
        Counts of parameters, FLOPs and bytes, ``ops`` as a DataFrame, ``nx`` as a
        networkx.DiGraph, the pattern of the blocks, where the model can be cut into stages, and
        ``graph``, the operator graph as data.

    Raises:
        RequestError: A size is below 1, or there is no such dtype.
        ModelError: The model cannot be loaded or traced.
    """
    check_trace(microbatch_size=microbatch_size, seq_len=seq_len, dtype=dtype)
    model_object = model_argument(model, example_batch, loss_fn)
    with timed_phase(progress, "load"):
        loaded = load_argument(
            model_words(model), model_object, seq_len=seq_len, hints=make_hints(hints or {})
        )
    from planner.graph.recording.trace_progress import TRACE_PHASE
    from planner.graph.trace import trace_model

    with timed_phase(progress, TRACE_PHASE):
        graph = trace_model(loaded, microbatch_size=microbatch_size, dtype=dtype, progress=progress)
        return TraceResult(graph)


def trace_lengths(
    model: "str | nn.Module | Callable[[], nn.Module]",
    *,
    longest: int,
    dtype: str = Dtype.BFLOAT16,
    example_batch: Callable[..., Any] | None = None,
    loss_fn: "Callable[[Any, Any], Tensor] | None" = None,
    hints: Mapping[str, bool | int | float] | None = None,
) -> TracedLengths:
    """Trace a model for every microbatch size and every sequence length up to a longest one.

    Args:
        model: As for ``plan``; its ``example_batch`` takes a ``seq_len``.
        longest: Longest sequence that will be asked for, tokens.
        dtype: Compute dtype: "bfloat16", "float32" or "float64".
        example_batch: As for ``plan``.
        loss_fn: As for ``plan``.
        hints: As for ``plan``.

    Returns:
        Traced steps by ``.at(microbatch_size, seq_len)``, evaluated exactly from a few traces
        where the model follows a polynomial in both, else traced.

    Raises:
        RequestError: The length is below 1, the model's data has no length, or there is no such
            dtype.
        ModelError: The model cannot be loaded or traced.
    """
    check_trace(microbatch_size=1, seq_len=longest, dtype=dtype)
    model_object = model_argument(model, example_batch, loss_fn)
    loaded = load_argument(
        model_words(model), model_object, seq_len=longest, hints=make_hints(hints or {})
    )
    from planner.graph.sizes.lengths import LengthFamily

    return TracedLengths(LengthFamily(loaded, longest=longest, dtype=dtype))
