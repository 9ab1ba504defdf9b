"""Constants that people have fitted for their own clusters, read from their files."""

from pathlib import Path

from planner.framework.profiles import list_frameworks
from planner.framework.tuning import SETTINGS
from planner.hardware.fields import FieldReader, near_names, read_toml

FrameworkOnCluster = tuple[str, str]
"""Names of a framework profile and of a cluster profile."""


def load_calibration(path: Path) -> dict[FrameworkOnCluster, dict[str, float]]:
    """Read constants by framework and cluster.

    Raises:
        ProfileError: The file is not a calibration, or a name in it is unknown.
    """
    reader = FieldReader(path=path, table=read_toml(path))
    reader.taken.add("format")
    found: dict[FrameworkOnCluster, dict[str, float]] = {}
    for index, table in enumerate(reader.tables("tuned")):
        each = FieldReader(path=path, table=table, prefix=f"tuned[{index}].")
        framework = each.text("framework", choices=list_frameworks())
        cluster = each.text("cluster")
        keys = [key for key in table if key not in ("framework", "cluster")]
        for key in keys:
            if key not in SETTINGS:
                raise each.error(key, "is unknown", hint=near_names(key, SETTINGS))
        found[framework, cluster] = {key: each.number(key, least=-100) for key in keys}
    reader.finish()
    return found
