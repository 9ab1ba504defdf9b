"""The script's look at the model, taken before the script is written.

The script runs the model once on the meta device to see what a stage consists of. A model that
reads data there needs the answers of its plan, and not every read can be answered.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.errors import CodegenError
from planner.plan.types import Plan
from planner.runtime.anatomy import examine
from planner.runtime.first_weights import parameters_on_meta
from planner.runtime.known_data import DataRead
from planner.runtime.model import UserModel, user_module
from planner.runtime.options import DTYPES


def try_model(plan: Plan, blocks: tuple[str, ...], config_files: Mapping[str, str]) -> None:
    """Run the model of a plan as its script will, with the plan's answers.

    Args:
        plan: A plan whose script looks at the model.
        blocks: Paths of its blocks in execution order.
        config_files: Model file and config of a Hugging Face config, else empty.

    Raises:
        CodegenError: It does not run.
    """
    reads = [
        DataRead(each.file, each.line, tuple(zip(each.answers, each.repeats, strict=True)))
        for each in plan.data_reads
    ]
    with TemporaryDirectory() as folder:
        for name, text in config_files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        file = (
            Path(folder, "model.py") if config_files else plan.model.file and Path(plan.model.file)
        )
        user = UserModel(
            file=file or None,
            module=plan.model.module,
            factory=plan.model.factory,
            seq_len=plan.model.seq_len,
        )
        try:
            with parameters_on_meta():
                model = getattr(user_module(user), user.factory)()
            microbatch, _ = user.example_batch(plan.microbatch_size)
            examine(model, blocks, microbatch, DTYPES[plan.dtype], reads)
        except Exception as error:  # the model's own code may raise anything
            raise CodegenError(
                "the model reads data where the script looks at it without any, and the plan's "
                f"hints and assumptions do not answer that: {type(error).__name__}: {error}",
                hint="plan with --fix pp=1 --fix sequence_parallel=false, or decide from shapes",
            ) from error
