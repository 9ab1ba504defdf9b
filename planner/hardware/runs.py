"""Which cluster a published run was on, by its accelerator and its source."""

from dataclasses import dataclass
from functools import cache

from planner.hardware.fields import FieldReader, read_toml
from planner.hardware.profiles import PROFILES_FOLDER, list_clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMatch:
    """Rows of tables of runs that are taken for runs on a cluster."""

    cluster: str
    """Name of the cluster profile."""
    gpu: str
    """The row's accelerator, "H100-80GB-SXM"."""
    source: str
    """What the row's source column contains, "" for anything."""


@cache
def cluster_matches() -> tuple[ClusterMatch, ...]:
    """The rows that each shipped cluster is for: tables ``[[runs]]`` of its profile.

    Raises:
        ProfileError: A field of a profile is wrong.
    """
    return tuple(match for name in list_clusters() for match in _matches(name))


def _matches(name: str) -> list[ClusterMatch]:
    path = PROFILES_FOLDER / "clusters" / f"{name}.toml"
    reader = FieldReader(path=path, table=read_toml(path))
    found = []
    for index, table in enumerate(reader.tables("runs") if reader.has("runs") else []):
        each = FieldReader(path=path, table=table, prefix=f"runs[{index}].")
        source = each.text("source_has") if each.has("source_has") else ""
        found.append(ClusterMatch(cluster=name, gpu=each.text("gpu"), source=source))
        each.finish()
    return found
