"""What the script does with the model before it trains, done before the script is written.

The script of some plans runs the model once on the meta device, to see what a stage consists of. A
model that reads data there needs the answers of its plan, and not every read can be answered. Each
stage then runs the model's code with stand-ins for what others hold, which code may not bear that
keeps tensors in attributes. Code of a block that torch.compile does not trace would end the first
step, and so would a kernel that a CPU does not have.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from planner.codegen.divided_trial import divide_backward
from planner.codegen.emit import blocks_of_stage
from planner.codegen.kernels import KernelTrial
from planner.codegen.split_trial import draw_graphs
from planner.codegen.undrawn import undrawn_model
from planner.errors import CodegenError
from planner.graph.loading.loaded_model import default_dtype
from planner.graph.loading.user_module import ImportScope
from planner.plan.types import Plan, StagePlan
from planner.runtime.anatomy import Anatomy, examine, meta_twin, run_on_meta
from planner.runtime.dry_run import DryRun
from planner.runtime.float64_groups import allow_float64_groups
from planner.runtime.known_data import DataRead, KnownData
from planner.runtime.model import UserModel, run_model, user_module
from planner.runtime.options import DTYPES
from planner.runtime.pipeline import examples
from planner.runtime.stages import Stage, StageSpec
from planner.runtime.stand_ins import EarlierModule
from planner.runtime.trees import Args, Kwargs, Microbatch, Tree, cast_floats, tensors_of
from planner.vocabulary import ZERO_BUBBLE_SCHEDULES


class ModelTrial:
    """Runs the model of a plan as its script will, without weights or data."""

    def __init__(
        self, plan: Plan, blocks: tuple[str, ...], config_files: Mapping[str, str]
    ) -> None:
        """Keep what to run.

        Args:
            plan: The plan.
            blocks: Paths of its blocks in execution order.
            config_files: Model file and config of a Hugging Face config, else empty.
        """
        self._plan = plan
        self._blocks = blocks
        self._config_files = config_files
        self._dtype = DTYPES[plan.dtype]
        self._reads = [
            DataRead(each.file, each.line, tuple(zip(each.answers, each.repeats, strict=True)))
            for each in plan.data_reads
        ]

    def look(self) -> None:
        """Run the model once, with the plan's answers.

        Raises:
            CodegenError: It does not run.
        """
        try:
            with self._model() as (model, user):
                microbatch = self._microbatch(user)[0]
                anatomy = examine(model, self._blocks, microbatch, self._dtype, self._reads)
                stages = self._stages(model, anatomy)
        except Exception as error:  # the model's own code may raise anything
            words = f"{type(error).__name__}: {error}"
            if not self._reads:
                raise CodegenError(
                    "stages are cut from copies of the model, and one without data does not run: "
                    + words,
                    hint="plan with --fix pp=1",
                ) from error
            raise CodegenError(
                "the model reads data where the script looks at it without any, and the plan's "
                f"hints and assumptions do not answer that: {words}",
                hint="plan with --fix pp=1 --fix sequence_parallel=false, or decide from shapes",
            ) from error

        for stage in stages:
            try:
                with default_dtype(self._dtype):
                    self._run(stage, microbatch)
            except CodegenError:
                raise
            except Exception as error:  # the same
                raise CodegenError(
                    f"stage {stage.index} of {len(stages)} does not run the model's code, of which "
                    f"others hold parts: {type(error).__name__}: {_first_line(error)}",
                    hint="plan with --fix pp=1, or hand over what code around the blocks reads as "
                    "arguments and results of modules",
                ) from error

    def _stages(self, model: nn.Module, anatomy: Anatomy) -> list[Stage]:
        """Cut the stages as the script does, without data."""
        plan = self._plan
        if plan.degrees.pp == 1:
            return []
        specs = [_spec(plan, stage) for stage in plan.stages]
        changed = plan.model.changed_buffers
        twin = meta_twin(model, self._dtype)
        return [
            Stage(twin, anatomy, _NoLoss(), specs, index, changed) for index in range(len(specs))
        ]

    def _run(self, stage: Stage, microbatch: Tree) -> None:
        """Run the forward of a stage on the meta device, and a backward that is divided."""
        meta = stage.device = torch.device("meta")
        stage.dtype = self._dtype
        for module in stage.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(meta)
            if isinstance(module, EarlierModule):
                module.allocate(meta)
        stage.register_late_hooks()
        examples_of = () if stage.is_first else examples(stage, None, after=False)
        received = [each.detach().requires_grad_(each.requires_grad) for each in examples_of]
        inputs = cast_floats(
            tree_map_only(torch.Tensor, lambda t: t.to(meta), microbatch), self._dtype
        )
        with KnownData(inputs, microbatch, self._reads):
            output = stage(*received, inputs=inputs, targets=None)
        if self._plan.schedule in ZERO_BUBBLE_SCHEDULES and not stage.is_first:
            divide_backward(stage, tensors_of(output), received, self._plan.schedule)

    def kernels(self) -> None:
        """Run the model once, and each function of torch that it calls on a CPU.

        Raises:
            CodegenError: A kernel does not take the dtype.
        """
        if self._plan.model.has_groups:
            allow_float64_groups()
        try:
            with self._model() as (model, user):
                both = self._microbatch(user)
                inputs, targets = tree_map_only(torch.Tensor, lambda t: t.to("meta"), both)
                inputs = cast_floats(inputs, self._dtype)
                twin = meta_twin(model, self._dtype)
                with KnownData((inputs, targets), both, self._reads), KernelTrial():
                    user.loss(run_model(twin, inputs), targets)
        except CodegenError:
            raise
        except Exception:  # of reads that no plan answers: nothing is known then
            return

    def compile(self) -> None:
        """Trace the blocks as torch.compile does, the first of each class, or as they are split.

        Raises:
            CodegenError: One is not traced in one graph.
        """
        if self._plan.degrees.splits_modules:
            with self._model() as (model, user):
                microbatch = user.example_batch(self._plan.microbatch_size)
                looked_at = model, user, self._blocks, microbatch, self._dtype, self._reads
                draw_graphs(self._plan, DryRun.of(*looked_at))
            return
        arguments: dict[str, tuple[Args, Kwargs]] = {}
        with self._model() as (model, user):
            microbatch = self._microbatch(user)[0]
            twin = meta_twin(model, self._dtype)
            first = {type(twin.get_submodule(path)): path for path in reversed(self._blocks)}
            for path in first.values():
                twin.get_submodule(path).register_forward_pre_hook(
                    partial(_note_arguments, arguments, path), with_kwargs=True
                )
            run_on_meta(twin, microbatch, self._dtype, self._reads)
            for path, (args, kwargs) in arguments.items():
                forward = twin.get_submodule(path).forward
                compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="eager")
                try:
                    compiled(*args, **kwargs)
                except Exception as error:  # of user code, or of torch under it
                    raise CodegenError(
                        f"torch.compile does not trace {path} in one graph: "
                        f"{type(error).__name__}: {_first_line(error)}",
                        hint="plan without --fix compile=true, or write the line that is named "
                        "in another way",
                    ) from error

    @contextmanager
    def _model(self) -> Iterator[tuple[nn.Module, UserModel]]:
        """Build the model without weights."""
        model = self._plan.model
        with TemporaryDirectory() as folder, default_dtype(self._dtype):
            for name, text in self._config_files.items():
                Path(folder, name).write_text(text, encoding="utf-8")
            own = Path(folder, "model.py") if self._config_files else None
            file = own or (Path(model.file) if model.file else None)
            place = Path.cwd() if file is None else file.resolve().parent
            user = UserModel(
                file=file,
                module=model.module,
                folder=place if file is None else None,
                factory=model.factory,
                seq_len=model.seq_len,
            )
            with _imported_anew(place):
                yield undrawn_model(user), user

    def _microbatch(self, user: UserModel) -> Microbatch:
        """Inputs and targets of a microbatch."""
        return user.example_batch(self._plan.microbatch_size)


@contextmanager
def _imported_anew(folder: Path) -> Iterator[None]:
    """Let the script's modules import the model from a folder, as it is there now, and forget it.

    Another model of this process may have modules of the same names.
    """
    user_module.cache_clear()
    try:
        with ImportScope(folder).active():
            yield
    finally:
        user_module.cache_clear()


def _spec(plan: Plan, stage: StagePlan) -> StageSpec:
    """The stage as the script names it, without what is recomputed."""
    blocks, stream = blocks_of_stage(plan, stage), stage.stream_output
    return StageSpec(
        stage.pp_rank,
        blocks.start,
        blocks.stop,
        receives=tuple((each.module, each.index) for each in stage.carried),
        stream_output=None if stream is None else (stream.module, stream.index),
    )


class _NoLoss:
    """Stands for the model file: losses may read targets."""

    def loss(self, output: Tree, _targets: Tree) -> torch.Tensor:
        """Return a loss of all that has a gradient."""
        trained = (each for each in tensors_of(output) if each.requires_grad)
        return sum((each.sum() for each in trained), torch.zeros((), device="meta"))


def _note_arguments(
    found: dict[str, tuple[Args, Kwargs]], path: str, _: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    found.setdefault(path, tree_map_only(torch.Tensor, _leaf, (args, kwargs)))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
