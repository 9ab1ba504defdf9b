"""The words of a table: precisions, forms of data parallelism, recomputations, schedules."""

import re
from collections.abc import Mapping

from planner.validation.types import DataParallel
from planner.vocabulary import Dtype, Recomputation, Schedule

DTYPES: Mapping[str, str] = {
    **{str(name): name for name in (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32)},
    **{"bf16": Dtype.BFLOAT16, "fp16": Dtype.FLOAT16, "fp32": Dtype.FLOAT32},
}
"""Dtype by the spelling of a precision."""

_FLOAT8 = re.compile(r"(?:fp8|float8)(?:\(te\)\+| tensorwise$|\+)(?P<beside>\w*)")
"""Products in float8 with a scale for each tensor, by torch or Transformer Engine, and the dtype
beside them: "fp8+bf16", "fp8(TE)+bf16", "fp8 tensorwise"."""

RECOMPUTE_WORDS: Mapping[str, str] = {
    **{str(name): name for name in Recomputation},
    "selective(op)": Recomputation.SELECTIVE,
    "selective(every other layer)": Recomputation.EVERY_OTHER_LAYER,
}
"""Recomputation by its spelling; selective(op) keeps the results of the costly operators."""

SCHEDULE_WORDS: Mapping[str, str] = {
    **{name.lower(): name for name in Schedule if name != Schedule.NONE},
    "interleaved 1f1b": Schedule.INTERLEAVED,
    "1f1b-i": Schedule.INTERLEAVED,
}
"""Schedule by its spelling, in small letters."""

OPEN_SCHEDULES = frozenset({"", "fsdp"})
"""Spellings that leave the schedule open."""

ZERO_FORMS: Mapping[str, DataParallel] = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
"""Form of data parallelism by the number of its ZeRO stage."""

DDP_WORDS = frozenset({"ddp", "none"})
"""Spellings of data parallelism that shards nothing."""

_STAGE = re.compile(r"(?P<stage>[0-3])(?:\.0|-equivalent)?(?: \((?P<note>.*)\))?")
"""A ZeRO stage, in a column of numbers "1.0", with a note: "1 (sharded within 8 GPUs)"."""

_FSDP = re.compile(
    r"FSDP2?(?: (?P<mode>FULL_SHARD|SHARD_GRAD_OP)| (?:over \S+=)?(?P<ranks>\d+))?"
    r"(?: \(ZeRO-(?P<stage>[23])\))?"
)
"""Fully sharded data parallelism: "FSDP FULL_SHARD (ZeRO-3)", "FSDP2 over dp*cp=8"."""


class NotModelledError(ValueError):
    """A sound row describes what the model has no words for; the text says what."""


def read_float8(text: str) -> bool:
    """Tell from a precision whether linear layers multiply in float8."""
    return _FLOAT8.fullmatch(text.lower()) is not None


def read_dtype(text: str) -> str | None:
    """Read a precision; None where it is empty.

    Raises:
        NotModelledError: It is none of ``DTYPES``, nor float8 beside one: "fp8".
    """
    if not text:
        return None
    found = _FLOAT8.fullmatch(text.lower())
    try:
        return DTYPES[(found["beside"] or "bf16") if found else text.lower()]
    except KeyError:
        raise NotModelledError(f"precision {text} is not modelled") from None


def read_recompute(text: str) -> str | None:
    """Read a recomputation; None where it is empty: the source does not say.

    Raises:
        NotModelledError: It is none of ``RECOMPUTE_WORDS``.
    """
    if not text:
        return None
    try:
        return RECOMPUTE_WORDS[text.lower()]
    except KeyError:
        raise NotModelledError(f"recomputation {text} is not modelled") from None


def read_schedule(text: str, *, pp: int, virtual_stages: int) -> str:
    """Read the schedule of a pipeline.

    With one stage there is none. An open one is 1F1B, or its interleaved form where ranks hold
    several stages; 1F1B with several stages per rank is the interleaved form as well.

    Raises:
        NotModelledError: It is none of ``SCHEDULE_WORDS``.
    """
    if pp == 1:
        return Schedule.NONE
    word = re.sub(r"\s*\(.*\)$", "", text.lower())
    if word in OPEN_SCHEDULES:
        word = "1f1b"
    if word not in SCHEDULE_WORDS:
        raise NotModelledError(f"schedule {text} is not modelled")
    schedule = SCHEDULE_WORDS[word]
    return (
        Schedule.INTERLEAVED
        if schedule == Schedule.ONE_F_ONE_B and virtual_stages > 1
        else schedule
    )


def read_data_parallel(text: str, *, ranks: int) -> tuple[DataParallel, int | None]:
    """Read what data parallelism shards, and over how many ranks.

    "0 (DDP)", "1", "1 (sharded within 8 GPUs)", "FSDP SHARD_GRAD_OP (ZeRO-2)", "FSDP2 over
    dp*cp=8". FSDP without more words is ZeRO-3.

    Args:
        text: The cell.
        ranks: Data-parallel ranks in all, with those of context parallelism.

    Returns:
        The form, and the ranks that share one copy of the state, None for all of them.

    Raises:
        NotModelledError: It is no such form.
    """
    if text.lower() in DDP_WORDS:
        return "ddp", None
    if stage := _STAGE.fullmatch(text):
        shared = re.fullmatch(r"sharded within (\d+) GPUs", stage["note"] or "")
        if shared or "within" not in (stage["note"] or ""):
            return ZERO_FORMS[stage["stage"]], _fewer(shared and shared[1], ranks)
    elif fsdp := _FSDP.fullmatch(text):
        number = fsdp["stage"] or ("2" if fsdp["mode"] == "SHARD_GRAD_OP" else "3")
        return ZERO_FORMS[number], _fewer(fsdp["ranks"], ranks)
    raise NotModelledError(f"data parallelism {text} is not modelled")


def _fewer(shard_ranks: str | None, ranks: int) -> int | None:
    """Ranks that share a copy; None where these are all ranks."""
    return None if shard_ranks is None or int(shard_ranks) >= ranks else int(shard_ranks)
