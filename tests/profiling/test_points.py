"""Points of an interrupted measurement are kept, those of another one are never joined."""

import json

import pytest

from planner.errors import ProfileError
from planner.profiling.points import Machine, PointFile, Settings

MACHINE = Machine(
    processor="a CPU", cores=2, torch="2.13.0", device="cpu", memory_bytes=2**34, num_sms=1, ranks=2
)
SETTINGS = Settings(processes=2, hosts=1, quick=True)


def test_a_measurement_goes_on_after_the_last_whole_line(tmp_path):
    path = tmp_path / "points.jsonl"
    file = PointFile(path, MACHINE, SETTINGS)
    file.add({"job": "first", "kind": "op"})
    with path.open("a") as stream:
        stream.write('{"job": "second", "ki')  # killed here
    again = PointFile(path, MACHINE, SETTINGS)
    assert again.done == ["first"]
    again.add({"job": "second", "kind": "op"})
    assert PointFile(path, MACHINE, SETTINGS).done == ["first", "second"]


@pytest.mark.parametrize(
    ("machine", "settings", "said"),
    [
        ({"cores": 4}, {}, "cores was 2, now it is 4"),
        ({}, {"processes": 8}, "processes was 2, now it is 8"),
    ],
)
def test_points_of_another_measurement_are_refused(tmp_path, machine, settings, said):
    path = tmp_path / "points.jsonl"
    PointFile(path, MACHINE, SETTINGS).add({"job": "first", "kind": "op"})
    changed = (
        Machine(**{**_fields(MACHINE), **machine}),
        Settings(**{**_fields(SETTINGS), **settings}),
    )
    with pytest.raises(ProfileError, match=said):
        PointFile(path, *changed)
    assert len(path.read_text().splitlines()) == 2


def test_a_file_that_is_no_list_of_points_is_refused(tmp_path):
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps({"format": 0}) + "\n")
    with pytest.raises(ProfileError, match="another format"):
        PointFile(path, MACHINE, SETTINGS)


def _fields(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
