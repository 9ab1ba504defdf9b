"""Fits the constants of the shipped profiles again: all of them at once, over all runs.

``python tests/bench/fitting/refit.py`` prints each constant, what it belongs to, its value before
and after, and the errors by part of the tables; ``--write`` puts the constants into the profiles.
Takes a few minutes on one core. ``left_out.py`` says what they are worth.

Three more rules, computed here as well:

- A framework's ``reserve_gib`` is what its runs hold beyond what is counted, of least mean error.
- The emitted script shares the constants of FSDP in eager torch (``fit_parameters.FSDP``).
- A device without runs takes ``training_fraction_of_sustained`` of its nearest relative, as
  assumed (``RELATIVES``).
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fit_parameters import PARAMETERS, RELATIVES, RESERVES, Parameter
from joint_fit import FitRow, JointFit, Pricer, constants_of, published_rows, thinned

from planner.framework.constants import PROFILES_OWN
from planner.framework.profiles import load_framework
from planner.hardware.profiles import PROFILES_FOLDER
from planner.units import GIB

_DIGITS = 4
_SOURCE = "tests/bench/fitting/refit.py"
_FOLDERS = {"device": "devices", "cluster": "clusters", "framework": "frameworks"}


def profile_file(owner: str, name: str) -> Path:
    """File of a shipped profile."""
    return PROFILES_FOLDER / _FOLDERS[owner] / f"{name}.toml"


def written(text: str, key: str, value: float, source: str, *, provenance: str = "fitted") -> str:
    """A profile's text with another number in the place of a key's.

    Args:
        text: The profile, or a part of it; the key stands there on a line of its own.
        key: Which.
        value: The number.
        source: Where it is from.
        provenance: How it came to be.
    """
    number = float(f"{value:.{_DIGITS}g}")
    line = f'{key} = {{ value = {number:g}, provenance = "{provenance}", source = "{source}" }}'
    text, found = re.subn(rf"(?m)^{re.escape(key)} = .*$", lambda _: line, text)
    assert found == 1, f"{key} stands {found} times"
    return text


def _value_of(text: str, key: str) -> float:
    found = re.search(rf"(?m)^{re.escape(key)} = \{{ value = ([^,]+),", text)
    assert found, f"{key} is not there"
    return float(found[1])


def write_parameter(parameter: Parameter, value: float, num_rows: int) -> None:
    """Put a constant into the profiles of its owners."""
    shared = f", shared by {', '.join(parameter.names)}" if len(parameter.names) > 1 else ""
    source = f"{_SOURCE}: {num_rows} runs{shared}"
    for name in parameter.names:
        file = profile_file(parameter.owner, name)
        text = file.read_text(encoding="utf-8")
        text = written(text, parameter.key, value, source)
        file.write_text(text, encoding="utf-8")


def shipped_start(parameter: Parameter) -> float:
    """What the profile holds now."""
    text = profile_file(parameter.owner, parameter.names[0]).read_text(encoding="utf-8")
    return _value_of(text, parameter.key)


def errors_by_part(
    rows: Sequence[FitRow], pricer: Pricer, values: Mapping[Parameter, float]
) -> dict[str, list[float]]:
    """Absolute errors of the step times of all rows, by part of the tables."""
    constants = constants_of(values) if values else PROFILES_OWN
    found: dict[str, list[float]] = {}
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [row for row in rows if row.pair == pair]
        for row, error in zip(own, pricer.log_errors(pair, own, constants), strict=True):
            found.setdefault(row.part, []).append(abs(math.exp(error) - 1))
    return found


def reserves(
    rows: Sequence[FitRow], pricer: Pricer, values: Mapping[Parameter, float]
) -> dict[tuple[str, ...], float]:
    """GiB that runs hold beyond what is counted, by frameworks: of least mean relative error.

    That is the median of what is missing, each run weighted by one over its memory.
    """
    constants = constants_of(values)
    found = {}
    for names in RESERVES:
        missing: list[tuple[float, float]] = []
        for row in rows:
            name, run = row.case.framework.name, row.case.run
            if name in names and run.peak_mem_bytes:
                counted = pricer.price(row, constants).memory.total_bytes
                reserve_bytes = load_framework(name).reserve_bytes
                kept_bytes = run.peak_mem_bytes - counted + (reserve_bytes or 0)
                missing.append((kept_bytes, 1 / run.peak_mem_bytes))
        found[names] = weighted_median(missing) / GIB
    return found


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value below which half of the weight lies.

    Args:
        values: Values and their weights.
    """
    half, reached = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("there are no values")


def main(arguments: Sequence[str]) -> int:
    """Fit, print, and with ``--write`` put the constants into the profiles."""
    parser = argparse.ArgumentParser(prog="python tests/bench/fitting/refit.py")
    parser.add_argument("--write", action="store_true", help="put the constants into the profiles")
    options = parser.parse_args(arguments)
    rows, pricer = published_rows(), Pricer()
    start = {each: shipped_start(each) for each in PARAMETERS}
    before = errors_by_part(rows, pricer, {})
    fit = JointFit(thinned(rows), PARAMETERS, pricer)
    values = fit.fitted(start)
    for parameter, value in values.items():
        sys.stdout.write(f"{parameter.label:76} {start[parameter]:8.4g} -> {value:.4g}\n")
    kept = reserves(rows, pricer, values)
    for names, gib in kept.items():
        sys.stdout.write(f"framework {names[0]}: reserve_gib -> {gib:.4g}\n")
    sys.stdout.write(f"{len(values) + len(kept)} constants\n")
    for part, errors in errors_by_part(rows, pricer, values).items():
        old = statistics.fmean(before[part])
        sys.stdout.write(
            f"{part:78} {len(errors):5} rows, mean error {old:6.1%} -> "
            f"{statistics.fmean(errors):6.1%}, median {statistics.median(errors):6.1%}\n"
        )
    if options.write:
        _write(values, kept, fit)
    return 0


def _write(
    values: Mapping[Parameter, float], kept: Mapping[tuple[str, ...], float], fit: JointFit
) -> None:
    for parameter, value in values.items():
        write_parameter(parameter, value, fit.num_rows(parameter))
    for names, gib in kept.items():
        for name in names:
            file = profile_file("framework", name)
            source = f"{_SOURCE}: what the runs hold beyond what is counted, in the median"
            text = written(file.read_text(encoding="utf-8"), "reserve_gib", gib, source)
            file.write_text(text, encoding="utf-8")
    key = "training_fraction_of_sustained"
    for relative, names in RELATIVES.items():
        share = _value_of(profile_file("device", relative).read_text(encoding="utf-8"), key)
        for name in names:
            file = profile_file("device", name)
            source = f"as {relative}, the nearest relative with runs"
            text = written(
                file.read_text(encoding="utf-8"), key, share, source, provenance="assumed"
            )
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
