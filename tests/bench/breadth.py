"""Traces every architecture of transformers in its default size, in workers of their own.

Alone: ``python tests/bench/breadth.py [TYPE or CLASS ...]``.
"""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TABLES = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
    "speech": "SPEECH_SEQ_2_SEQ",
    "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION",
}
WORKERS = 2
LIMIT_S = 240.0
MICROBATCH_SIZE = 2

UNBUILT = "transformers cannot build its default config"
UNTRAINABLE = "nobody can train its default config"
SEVERAL_MEDIA = "takes several media"
TRACED = "traced"
TRACED_IN_FLOAT32 = "traced in float32 only"
FAILED = "failed"

NOT_TRAINABLE = {
    "DeepseekV2ForCausalLM": "num_experts_per_tok is None, and its router needs a number",
    "PPLCNetForImageClassification": "it takes no labels and returns no loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One architecture, and what became of it."""

    group: str
    model_type: str
    class_name: str
    outcome: str = ""
    reason: str = ""
    """First line of the error, or of why it was not tried."""
    trace_s: float = 0.0
    ops: int = 0
    parameters: int = 0
    flop_ratio: float = 0.0
    """FLOPs of backward over those of forward."""
    unread: tuple[str, ...] = ()
    """Parameters that need a gradient and are read by no op."""
    warnings: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The outcome on a line."""
        name = f"{self.group:8} {self.model_type:26} {self.trace_s:6.1f} s"
        if not self.ops:
            return f"{name}  {self.outcome}: {self.reason}"
        return (
            f"{name} {self.ops:8,} ops {self.parameters / 1e6:10,.0f} M parameters  "
            f"backward {self.flop_ratio:.2f}  {self.outcome}"
            + (f": {self.reason}" if self.reason else "")
            + "".join(f"\n    {warning}" for warning in self.warnings)
        )


def architectures() -> list[Outcome]:
    """List the class that each of transformers' tables has for each type of config."""
    from transformers.models.auto import modeling_auto

    found = {}
    for group, table in TABLES.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
        for model_type, classes in names.items():
            class_name = classes if isinstance(classes, str) else classes[0]
            key = (model_type, class_name)
            found.setdefault(
                key, Outcome(group=group, model_type=model_type, class_name=class_name)
            )
    return list(found.values())


# In a worker -----------------------------------------------------------------------------------


def attempt(job: Outcome) -> Outcome:
    """Trace one architecture as ``plan trace config.json`` does."""
    from planner.errors import PlannerError
    from planner.graph.loading.load import load_model

    if job.class_name in NOT_TRAINABLE:
        return replace(job, outcome=UNTRAINABLE, reason=NOT_TRAINABLE[job.class_name])
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = default_config(job, Path(folder))
        except Exception as error:
            return replace(job, outcome=UNBUILT, reason=first_line(error))
        try:
            loaded = load_model(str(file))
        except PlannerError as error:
            return replace(job, outcome=why_not_loaded(job, error), reason=first_line(error))
        try:
            traced = examine(job, loaded, "bfloat16")
            outcome = replace(traced, outcome=TRACED)
        except PlannerError as error:
            outcome = in_float32(replace(job, reason=first_line(error)), loaded, error)
    return replace(outcome, trace_s=time.perf_counter() - start_s)


def why_not_loaded(job: Outcome, error: Exception) -> str:
    """Tell what cannot be built from what only we cannot."""
    import torch
    import transformers

    if "several media" in str(error):
        return SEVERAL_MEDIA
    try:
        with torch.device("meta"):
            getattr(transformers, job.class_name)(transformers.CONFIG_MAPPING[job.model_type]())
    except Exception:
        return UNBUILT
    return FAILED


def in_float32(job: Outcome, loaded, error: Exception) -> Outcome:
    """Do what the error says where it says so."""
    from planner.errors import PlannerError

    if "--dtype float32" not in str(error):
        return replace(job, outcome=FAILED)
    try:
        return replace(examine(job, loaded, "float32"), outcome=TRACED_IN_FLOAT32)
    except PlannerError as second:
        return replace(job, outcome=FAILED, reason=first_line(second))


def default_config(job: Outcome, folder: Path) -> Path:
    """Write the default config of a type as a file."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[job.model_type]()
    document = config.to_dict() | {"architectures": [job.class_name], "model_type": job.model_type}
    file = folder / "config.json"
    file.write_text(json.dumps(document, default=str))
    return file


def examine(job: Outcome, loaded, dtype: str) -> Outcome:
    """Trace a model and note what speaks for and against the trace."""
    from planner.graph.analysis.trace_warnings import trace_warnings
    from planner.graph.trace import trace_model

    graph = trace_model(loaded, microbatch_size=MICROBATCH_SIZE, dtype=dtype)
    read = {graph.values[value].storage for op in graph.nodes for value in op.inputs}
    return replace(
        job,
        ops=len(graph.nodes),
        parameters=graph.num_parameters,
        flop_ratio=graph.backward_flop / graph.forward_flop,
        unread=tuple(
            each.names[0]
            for each in graph.parameters
            if each.requires_grad and each.storage not in read
        ),
        warnings=trace_warnings(graph),
    )


def first_line(error: Exception) -> str:
    lines = str(error).replace(tempfile.gettempdir(), "").splitlines()
    return lines[0] if lines else type(error).__name__


def work() -> None:
    """Answer one job per line of standard input."""
    for line in sys.stdin:
        answer = attempt(Outcome(**json.loads(line)))
        print(json.dumps(asdict(answer)), flush=True)


# In the driver ---------------------------------------------------------------------------------


class Worker:
    """A process that answers one job after the other, and is replaced when it takes too long."""

    def __init__(self) -> None:
        self._process = self._start()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, job: Outcome) -> Outcome:
        """Hand over a job and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        answer = self._process.stdout.readline()
        timer.cancel()
        if answer:
            fields = json.loads(answer)
            lists = {name: tuple(fields[name]) for name in ("unread", "warnings")}
            return Outcome(**(fields | lists))
        self.close()
        self._process = self._start()
        return replace(job, outcome=FAILED, reason=f"no answer within {LIMIT_S:.0f} s")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def sweep(wanted: list[str]) -> Iterator[Outcome]:
    """Try all architectures, or those of some types or classes, as they come."""
    jobs: queue.Queue[Outcome] = queue.Queue()
    for job in architectures():
        if not wanted or {job.model_type, job.class_name} & set(wanted):
            jobs.put(job)
    done: queue.Queue[Outcome] = queue.Queue()

    def serve() -> None:
        worker = Worker()
        while True:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                worker.close()
                return
            done.put(worker.ask(job))

    count = jobs.qsize()
    for _ in range(WORKERS):
        threading.Thread(target=serve, daemon=True).start()
    for _ in range(count):
        yield done.get()


def summary(outcomes: list[Outcome]) -> str:
    """How many of those that can be traced at all were."""
    counts = {
        name: sum(each.outcome == name for each in outcomes)
        for name in (TRACED, TRACED_IN_FLOAT32, FAILED, SEVERAL_MEDIA, UNBUILT, UNTRAINABLE)
    }
    tried = counts[TRACED] + counts[TRACED_IN_FLOAT32] + counts[FAILED]
    traced = tried - counts[FAILED]
    return (
        f"{traced} of {tried} traced, {counts[TRACED_IN_FLOAT32]} of them in float32 only; "
        f"not counted: {counts[SEVERAL_MEDIA]} take several media, {counts[UNBUILT]} have a "
        f"default config that transformers cannot build, {counts[UNTRAINABLE]} one that nobody "
        "can train"
    )


def main(wanted: list[str]) -> None:
    outcomes = []
    for outcome in sweep(wanted):
        print(outcome.line, flush=True)
        outcomes.append(outcome)
    print(summary(outcomes))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main(sys.argv[1:])
