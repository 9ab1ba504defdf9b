"""Files for a user's own cluster: those of a shipped one with plain numbers to replace."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from planner.errors import ProfileError, RequestError
from planner.hardware.fields import near_names, read_toml
from planner.hardware.profiles import PROFILES_FOLDER, list_clusters

_OF_ITS_RUNS = ("runs", "step_time_errors")
"""What is known of runs on the shipped one only."""

_HEAD = """# A {kind} of your own, begun as {like}. Each plain number is stated by you: replace it,
# or leave it where yours is the same. Above each stands where that of {like} is from.
"""


def template_files(name: str, *, like: str) -> dict[str, str]:
    """Write the files of a new cluster: the cluster first, then its device.

    Args:
        name: Of the cluster; its files are NAME.toml and NAME-device.toml.
        like: Shipped cluster whose numbers stand in them.

    Raises:
        RequestError: The name is no plain file name.
        ProfileError: There is no such cluster.
    """
    if Path(name).name != name or Path(name).suffix:
        raise RequestError(
            f"plan profiles new {name}: a name has no folder and no suffix",
            hint=f"plan profiles new {Path(name).stem} --like {like}",
        )
    if name in list_clusters():
        raise RequestError(f"plan profiles new {name}: a cluster of that name ships already")
    if like not in list_clusters():
        raise ProfileError(
            f"--like {like}: no profile of that name is shipped",
            hint=near_names(like, list_clusters()),
        )
    cluster = read_toml(PROFILES_FOLDER / "clusters" / f"{like}.toml")
    device_name = str(cluster["device"])
    device = read_toml(PROFILES_FOLDER / "devices" / f"{device_name}.toml")
    device_file = f"{name}-device.toml"
    own_cluster = {**cluster, "name": name, "description": "", "device": device_file}
    own_device = {**device, "name": f"{name}-device", "description": ""}
    return {
        f"{name}.toml": _text("cluster", like, own_cluster),
        device_file: _text("device", device_name, own_device),
    }


def _text(kind: str, like: str, content: Mapping[str, object]) -> str:
    lines = [_HEAD.format(kind=kind, like=like)]
    tables = {key: value for key, value in content.items() if _is_tables(value)}
    own = {key: value for key, value in content.items() if _is_table(value)}
    lines += _lines({k: value for k, value in content.items() if k not in (*tables, *own)})
    for key, table in own.items():
        lines += [f"\n[{key}]", *_lines(table)]
    for key, value in tables.items():
        if key not in _OF_ITS_RUNS:
            assert isinstance(value, list)
            for table in value:
                lines += [f"\n[[{key}]]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    """Whether it is a table, and no number with its source."""
    return isinstance(value, dict) and "value" not in value


def _lines(content: Mapping[str, object]) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield f"# {value['provenance']}: {value['source']}"
            yield f"{key} = {json.dumps(value['value'])}"
        else:
            yield f"{key} = {json.dumps(value)}"
