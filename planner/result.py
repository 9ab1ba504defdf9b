"""What ``planner.plan`` and ``planner.estimate`` return."""

from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import RequestError
from planner.plan.record import PlanRecord
from planner.plan.types import Plan, SearchOutcome
from planner.report.document import plan_json
from planner.report.figures import plan_figures
from planner.report.folder import write_folder
from planner.report.words import detail_words, layout_words
from planner.units import format_bytes, format_s

if TYPE_CHECKING:
    import pandas as pd


class PlanResult:
    """A planned (or estimated) training run.

    In a notebook it shows as a table. It prints nothing and writes only when asked to.
    """

    def __init__(self, record: PlanRecord) -> None:
        """Keep the record of the run."""
        self._record = record

    @property
    def record(self) -> PlanRecord:
        """Request, model, cluster and outcome."""
        return self._record

    @property
    def outcome(self) -> SearchOutcome:
        """All that the search found."""
        return self._record.outcome

    @property
    def best(self) -> Plan:
        """The recommended plan."""
        return self._record.outcome.best

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know: options without effect, idle devices."""
        return self._record.warnings

    @property
    def candidates(self) -> "pd.DataFrame":
        """Priced layouts, fastest first, one row each; columns as in report.csv."""
        from planner.report.tables import candidates_frame

        return candidates_frame(self._record)

    @property
    def rejected(self) -> "pd.DataFrame":
        """Refused layouts with the rule and its numbers; columns as in report.csv."""
        from planner.report.tables import rejected_frame

        return rejected_frame(self._record)

    def to_json(self) -> str:
        """Give the content of plan.json.

        Raises:
            VerificationError: A plan breaks a rule.
        """
        return plan_json(self._record)

    def save(
        self, folder: str | Path, *, force: bool = False, script: bool = True
    ) -> tuple[Path, ...]:
        """Write plan.json, the script and the tables into a folder: all of them or none.

        Args:
            folder: Made where it does not exist.
            force: Replace files in a folder that is not empty; other files in it stay, but for
                modules of the runtime that the script does not need.
            script: Write the training script too. It imports the model, which it cannot where
                the model was passed as an object.

        Returns:
            Paths of the files, and of the folder of the script's runtime.

        Raises:
            RequestError: The folder is not empty and ``force`` is false, or cannot be written, or
                the script was asked for of another framework.
            CodegenError: The plan cannot be expressed as a script.
            VerificationError: A plan breaks a rule.
        """
        request = self._record.request
        if script and request.framework is not None:
            raise RequestError(
                f"the script is not what {request.framework} runs: an estimate of it has none",
                hint="Save the tables alone: save(folder, script=False).",
            )
        from planner.report.tables import table_files

        target = Path(folder)
        files, owned = {"plan.json": self.to_json()}, []
        if script:
            from planner.codegen.files import runtime_paths, script_files
            from planner.export.launch import launch_files

            files.update(script_files(self.best, cluster=self._record.cluster, folder=target))
            files.update(launch_files(self._record.cluster))
            owned = runtime_paths()
        files.update(table_files(self._record))
        return write_folder(target, files, force=force, owned=owned)

    def _repr_html_(self) -> str:
        from planner.report.html import summary_html

        return summary_html(self._record)

    def __repr__(self) -> str:
        figures = plan_figures(self.best, self._record.cluster)
        return (
            f"PlanResult({self._record.model.name!r} on {self._record.cluster.devices_words}: "
            f"{layout_words(self.best)}, "
            f"{detail_words(self.best)}, step {format_s(figures.step_time_s)}, "
            f"peak {format_bytes(figures.peak_memory_bytes)} of "
            f"{format_bytes(figures.capacity_bytes)})"
        )
