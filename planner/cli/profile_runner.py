"""Runs ``plan profile`` from the options to the last line on screen."""

from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from rich.text import Text

from planner.cli.option_types import ProfileOptions
from planner.cli.terminal import ProgressLine, answer_console, message_console, write_answer
from planner.errors import RequestError
from planner.hardware.profiles import load_cluster
from planner.profiling.measure import Places, measure, this_machine
from planner.profiling.points import PointFile, Settings
from planner.report.folder import check_file, write_file

if TYPE_CHECKING:
    from planner.profiling.fitted import Measured

FITS = "planner.profiling.fitted"

_BUSY = 1.25
"""Ranks that take so many times as long as their own work share the cores with something else."""


def run_profile(options: ProfileOptions) -> None:
    """Measure, write the files, print what was found.

    Raises:
        PlannerError: As the layers below.
    """
    out, force = options["out"], options["force"]
    if out.suffix != ".toml":
        raise RequestError(
            f"--out {out}: a profile is a TOML file", hint=f"--out {out.with_suffix('.toml')}"
        )
    files = [out, out.with_name(f"{out.stem}-device.toml")]
    for file in files:
        check_file(file, option="--out", force=force)
    points = out.with_name(f"{out.stem}-points.jsonl")
    if force:
        points.unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    hosts = tuple((options["hosts"] or "").split(",")) if options["hosts"] else ()
    machine = this_machine(options["device"])
    settings = Settings(
        processes=options["processes"] or machine.ranks,
        hosts=max(1, len(hosts)),
        quick=options["quick"],
    )
    quiet = options["quiet"]
    messages = message_console(no_color=options["no_color"])
    with ProgressLine(messages, verbose=options["verbose"] > 0, quiet=quiet) as progress:
        kept = PointFile(points, machine, settings)
        places = Places(hosts=hosts, remote=options["remote"])
        fits = Thread(target=import_module, args=[FITS])  # while the ranks import torch as well
        fits.start()
        measure(kept, machine, settings, places=places, progress=progress)
        fits.join()
        from planner.profiling.fitted import profile

        found = profile(out.stem, kept, machine, settings)
    for file, text in zip(files, found.files.values(), strict=True):
        write_file(file, text, option="--out", force=True)
    load_cluster(str(out), gpus=settings.processes * settings.hosts)
    if not quiet:
        words = [*_words(found, verbose=options["verbose"] > 0)]
        words.append(f"Wrote     {out}  {files[1]}  {points}")
        words.append(
            f"Plan      plan MODEL --gpus {settings.processes * settings.hosts} --cluster {out}"
        )
        write_answer(answer_console(no_color=options["no_color"]), [Text("\n".join(words))])


def _words(found: "Measured", *, verbose: bool) -> list[str]:
    device = found.device.device
    peaks = ", ".join(f"{dtype} {peak / 1e9:.3g}" for dtype, peak in device.peak_flop_per_s.items())
    lines = [
        f"Measured  {found.where}",
        f"Rates     {peaks} GFLOP/s; memory {device.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s; "
        f"{device.kernel_launch_s * 1e6:.3g} us for an op beyond its work",
    ]
    for link in found.links:
        values = link.values
        lines.append(
            f"Link      {values['gb_per_s']:.3g} GB/s, "
            f"{values['latency_us_per_hop']:.3g} us a hop, "
            f"{values['latency_us_per_collective']:.3g} us a collective (median error "
            f"{link.error:.0%} of {link.num_points})"
        )
    if verbose:
        errors = ", ".join(f"{kind} {error:.0%}" for kind, error in found.device.errors.items())
        lines.append(f"Fit       median error of ops: {errors}")
    if found.busy > _BUSY:
        lines.append(
            f"Busy      the ranks took {found.busy:.1f} times their own work on these cores: "
            "something else runs here. Times of collectives hold that too; measure again when "
            "the machine is quiet, with --force"
        )
    return lines
