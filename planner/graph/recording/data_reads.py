"""Answers to a model that reads data while it is traced without any."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from planner.errors import ModelError, PlannerError, RequestError
from planner.graph import torch_private
from planner.graph.loading.hints import Hint, HintValue
from planner.graph.loading.source import UserLine, lines_of_stack, runs_inside, value_that_goes_on
from planner.graph.operator_graph import DataRead
from planner.graph.recording.assumed import Assumption
from planner.graph.recording.choices import choice_of
from planner.graph.recording.known_values import KnownValues, run_for_real
from planner.graph.recording.recording import Decision
from planner.graph.recording.value_table import ValueTable
from planner.graph.torch_private import TorchOp, TorchResult

_META = torch.device("meta")

_SCALAR_RESULTS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "item"})
"""Ops that return a number of Python."""

_TRUTH_RESULTS = frozenset({"equal", "is_nonzero"})
"""Ops that return a truth value of Python."""

_CALLS = {"_local_scalar_dense": "item", "_unique2": "unique", "_unique": "unique"}
"""Names that users know, by op."""

_MOST_LINES_TOLD = 2
"""Lines of a file that have a sentence of their own."""

_NOWHERE = UserLine("", 0)


def has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Tell whether an index says by truth values which elements are meant."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class DataReads:
    """Says what a model reads from tensors that have no data.

    In this order: what follows from constants and the example batch, what is assumed (told in
    ``notes``), what a hint says. Otherwise the model cannot be traced.
    """

    def __init__(
        self,
        table: ValueTable,
        known: KnownValues,
        hints: Sequence[Hint],
        count_ops: Callable[[], int],
    ) -> None:
        self.failure: PlannerError | None = None
        """The error that was raised, which the model's own code may have caught."""
        self.again = False
        """Whether this is a recomputation, which reads what the first pass has read."""
        self._table = table
        self._known = known
        self._hints = hints
        self._used: dict[Hint, None] = {}
        self._asked: dict[str, None] = {}
        self._notes: dict[tuple[UserLine, str], dict[str, None]] = {}
        self._answers: dict[UserLine, set[HintValue]] = {}
        self._taken: dict[UserLine, Tensor] = {}
        self._answered: dict[UserLine, list[float]] = {}
        self._count_ops = count_ops
        self.decisions: list[Decision] = []
        """What draws decide."""
        self.counting_ops: list[int] = []
        """Ops of the forward pass that give as many elements as data say."""

    @property
    def used_hints(self) -> tuple[Hint, ...]:
        """Hints that a line asked for."""
        return tuple(self._used)

    @property
    def asked_places(self) -> tuple[str, ...]:
        """Lines that read data which nothing but a hint can tell, or which is assumed."""
        return tuple(dict.fromkeys((*self._asked, *(line.place for line, _ in self._notes))))

    @property
    def answered(self) -> tuple[DataRead, ...]:
        """What hints and assumptions answered in the forward pass, by line."""
        found = []
        for line, answers in self._answered.items():
            runs = [(value, len(list(group))) for value, group in groupby(answers)]
            found.append(
                DataRead(
                    file=PurePath(line.file).name,
                    line=line.number,
                    answers=tuple(value for value, _ in runs),
                    repeats=tuple(number for _, number in runs),
                )
            )
        return tuple(found)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, in a sentence for each line, or for each file where it has many."""
        by_file: dict[tuple[str, str], list[UserLine]] = {}
        for line, words in self._notes:
            by_file.setdefault((line.file, words), []).append(line)
        notes: list[str] = []
        for (_, words), lines in by_file.items():
            if len(lines) <= _MOST_LINES_TOLD:
                notes.extend(self._sentence(line, words) for line in lines)
                continue
            others = ", ".join(str(line.number) for line in lines[1:])
            notes.append(
                f"{lines[0].place} ({lines[0].code}) and lines {others} read data that only a real"
                f" run has: it is {words}"
            )
        return tuple(notes)

    def _sentence(self, line: UserLine, words: str) -> str:
        results = self._notes[line, words]
        given = f", which gives {' or '.join(results)}" if 0 < len(results) <= 2 else ""
        return (
            f"{line.place} ({line.code}) reads data that only a real run has: it is {words}{given}"
        )

    def run(
        self,
        func: TorchOp,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        inputs: Sequence[int],
    ) -> TorchResult:
        """Run an op whose result depends on data.

        Args:
            func: The op.
            arguments: Its positional and keyword arguments.
            inputs: Values of the tensors in them, in order.

        Raises:
            ModelError: The data is unknown.
            RequestError: A hint does not fit what is read.
        """
        name = torch_private.packet_name(func)
        if name in _SCALAR_RESULTS:
            return self._scalar(func, name, arguments, inputs)
        if not self.again:
            self.counting_ops.append(self._count_ops())
        if name == "index":
            return self._index(func, *arguments[0][:2])
        known = self._compute(inputs)
        results = None if known is None else run_for_real(func, *arguments, known)
        if results is not None:
            if self._known.assumptions(inputs) and results[0].dim():
                self._answer(next(lines_of_stack(), _NOWHERE), len(results[0]))
            self._note(inputs)
            metas = [torch.empty_like(result, device=_META) for result in results]
            return metas[0] if len(metas) == 1 else tuple(metas)
        choice = choice_of(name, *arguments)
        if choice is None:
            raise self._fail(self._error(name, next(lines_of_stack(), _NOWHERE), ""))
        return choice.make(self._count(name, choice.most))

    def read(self, tensor: Tensor, name: str) -> Tensor:
        """Return the data of a tensor as a real one, for Python code that takes all of it."""
        value = self._table.read(tensor, keep=True)
        real = self._known.compute(value)
        if real is not None:
            line = next(lines_of_stack(), _NOWHERE)
            if self._known.assumptions([value]):
                with torch_private.modes_disabled():
                    numbers: list[HintValue] = real.flatten().tolist()
                for number in numbers:
                    self._answer(line, number)
            self._note([value])
            self._taken[line] = real
            return real
        before = self._taken.get(next(lines_of_stack(), _NOWHERE)) if self.again else None
        if before is not None and before.shape == tensor.shape:
            return before
        number = self._number(name, tensor.dtype)
        with torch_private.modes_disabled():
            return torch.full(tensor.shape, number, dtype=tensor.dtype)

    # Kinds of results --------------------------------------------------------------------------

    def _scalar(
        self,
        func: TorchOp,
        name: str,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        inputs: Sequence[int],
    ) -> HintValue:
        known = self._compute(inputs)
        results = None if known is None else run_for_real(func, *arguments, known)
        self._look_for_decision(func, arguments, inputs)
        if results is not None:
            number: HintValue = results[0].item()
            if self._known.assumptions(inputs):
                self._answer(next(lines_of_stack(), _NOWHERE), number)
            self._note(inputs, str(number))
            self._remember(number)
            return number
        dtype = torch.bool if name in _TRUTH_RESULTS else arguments[0][0].dtype
        return self._number(name, dtype)

    def _look_for_decision(
        self,
        func: TorchOp,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        inputs: Sequence[int],
    ) -> None:
        """Note a number that other draws would change."""
        if self.again or Assumption.MEAN not in self._known.assumptions(inputs):
            return
        numbers = set()
        for reals in zip(*map(self._known.at_ends, inputs), strict=True):
            known = [real for real in reals if real is not None]
            results = run_for_real(func, *arguments, known) if len(known) == len(reals) else None
            numbers.add(None if results is None else results[0].item())
        if len(numbers) > 1 or None in numbers:
            place = next(lines_of_stack(), _NOWHERE).place
            self.decisions.append(Decision(before_op=self._count_ops(), place=place))

    def _index(self, func: TorchOp, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        """Index with masks, each replaced by the positions where it is true."""
        positions: list[Tensor | None] = []
        for index in indices:
            if index is None or not has_mask((index,)):
                positions.append(index)
                continue
            value = self._table.read(index, keep=True)
            masks = self._compute([value])
            if masks is None:
                count = self._count("boolean index", index.numel())
            else:
                count = int(torch.count_nonzero(masks[0]))
                if self._known.assumptions([value]):
                    self._answer(next(lines_of_stack(), _NOWHERE), count)
                self._note([value])
                self._remember(count)
            columns = [torch.empty(count, dtype=torch.long, device=_META)] * index.dim()
            positions.extend(columns)
        indexed: Tensor = func(source, positions)
        return indexed

    def _compute(self, inputs: Sequence[int]) -> list[Tensor] | None:
        """Return the data of values, None where it is unknown, or a hint says otherwise."""
        if self._known.assumptions(inputs) and self._hint_of_stack() is not None:
            return None
        known = []
        for value in inputs:
            real = self._known.compute(value)
            if real is None:
                return None
            known.append(real)
        return known

    # Unknown data ------------------------------------------------------------------------------

    def _number(self, name: str, dtype: torch.dtype) -> HintValue:
        """Return a number that a hint says, or that holds by the line that reads it."""
        kind = "truth value" if dtype == torch.bool else "number"
        if kind == "number" and not dtype.is_floating_point:
            kind = "whole number"
        line, hint = self._look_up()
        if isinstance(hint, Hint):
            self._check(hint, kind)
            self._answer(line, hint.value)
            self._remember(hint.value)
            return float(hint.value) if dtype.is_floating_point else hint.value
        if hint is not None:
            return hint
        if kind == "truth value" and (expected := _expected(line)) is not None:
            self._notes.setdefault((line, Assumption.ASSERTED), {})[str(expected)] = None
            self._answer(line, expected)
            return expected
        self._asked[line.place] = None
        example = "true" if kind == "truth value" else "3" if kind == "whole number" else "0.5"
        raise self._fail(
            self._error(name, line, f"Say what it reads: --hint {line.place}={example} (a {kind})")
        )

    def _count(self, name: str, most: int | None) -> int:
        """Return how many elements are chosen, as a hint says: a number or a share."""
        line, hint = self._look_up()
        if isinstance(hint, Hint):
            count = self._counted(hint, most)
            self._answer(line, count)
            self._remember(count)
            return count
        if hint is not None:
            return int(hint)
        self._asked[line.place] = None
        words = f"--hint {line.place}=64 (how many elements it chooses)"
        if most is not None:
            words = (
                f"--hint {line.place}=0.5 (the share that it chooses of {most} elements) or"
                f" {words.removeprefix('--hint ')}"
            )
        raise self._fail(self._error(name, line, f"Say what it reads: {words}"))

    def _counted(self, hint: Hint, most: int | None) -> int:
        value = hint.value
        if isinstance(value, float) and most is not None and 0 <= value <= 1:
            return round(value * most)
        limit = value if most is None else most
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit:
            return value
        wanted = "a whole number" if most is None else f"a share 0.0 to 1.0 or a number 0 to {most}"
        raise self._fail(
            RequestError(
                f"--hint {hint}: this line chooses elements by data; the hint says how many.",
                hint=f"Give {wanted}.",
            )
        )

    def _check(self, hint: Hint, kind: str) -> None:
        value = hint.value
        fits = {
            "truth value": isinstance(value, bool),
            "whole number": isinstance(value, int) and not isinstance(value, bool),
            "number": not isinstance(value, bool),
        }
        if not fits[kind]:
            raise self._fail(
                RequestError(
                    f"--hint {hint}: this line reads a {kind}.",
                    hint="Give true or false." if kind == "truth value" else f"Give a {kind}.",
                )
            )

    def _look_up(self) -> tuple[UserLine, Hint | HintValue | None]:
        """Find the line that reads, and its hint or what it read before."""
        if (found := self._hint_of_stack()) is not None:
            line, hint = found
            self._used[hint] = None
            self._asked[line.place] = None
            return line, hint
        lines = list(lines_of_stack()) or [_NOWHERE]
        before = self._answers.get(lines[0], set())
        if self.again and len(before) == 1:
            return lines[0], next(iter(before))
        return lines[0], None

    def _hint_of_stack(self) -> tuple[UserLine, Hint] | None:
        """Find the innermost line that runs now and has a hint."""
        for line in lines_of_stack() if self._hints else ():
            for hint in self._hints:
                if hint.matches(line.file, line.number):
                    return line, hint
        return None

    def _answer(self, line: UserLine, answer: HintValue) -> None:
        """Note an answer of the forward pass that hangs on a hint or an assumption."""
        if not self.again:
            self._answered.setdefault(line, []).append(float(answer))

    def _remember(self, answer: HintValue) -> None:
        self._answers.setdefault(next(lines_of_stack(), _NOWHERE), set()).add(answer)

    def _note(self, inputs: Sequence[int], result: str = "") -> None:
        for assumption in sorted(self._known.assumptions(inputs)):
            line = next(lines_of_stack(), _NOWHERE)
            results = self._notes.setdefault((line, assumption), {})
            if result:
                results[result] = None

    def _fail(self, error: PlannerError) -> PlannerError:
        self.failure = error
        return error

    @staticmethod
    def _error(name: str, line: UserLine, hint: str) -> ModelError:
        where = f" at {line}" if line is not _NOWHERE else ""
        advice = (
            "decide from shapes or from constants instead, or keep the result on the device with"
            " torch.where."
        )
        return ModelError(
            f"The model reads the data of a tensor ({_CALLS.get(name, name)}){where}\nIt is traced"
            " without data, and this value depends on weights or activations.",
            hint=f"{hint}, or {advice}" if hint else advice.capitalize(),
        )


def _expected(line: UserLine) -> bool | None:
    """Return the truth value that a check of the user's or of torch's distributions expects."""
    if runs_inside("torch/distributions/"):
        return True
    return value_that_goes_on(line.file, line.number)
