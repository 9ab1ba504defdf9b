"""Constants that people have fitted for their own machines, read from their files.

Three kinds of tables: ``[[device]]`` and ``[[cluster]]`` say what training reaches of the hardware,
``[[framework]]`` what code does; each has a ``name`` and numbers.
"""

from pathlib import Path

from planner.framework.constants import KEYS, Constants, Owner, Values, check_keys
from planner.framework.profiles import list_frameworks
from planner.hardware.fields import FieldReader, read_toml


def load_calibration(path: Path) -> Constants:
    """Read constants by their owners.

    Raises:
        ProfileError: The file is not a calibration, or a name in it is unknown.
    """
    reader = FieldReader(path=path, table=read_toml(path))
    reader.asked.add("format")
    constants = Constants(
        device=_of_owner(reader, "device"),
        cluster=_of_owner(reader, "cluster"),
        framework=_of_owner(reader, "framework"),
    )
    reader.finish()
    if not any(constants.of(owner) for owner in KEYS):
        raise reader.error("framework", "is missing, and so are 'device' and 'cluster'")
    return constants


def _of_owner(reader: FieldReader, owner: Owner) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for index, table in enumerate(reader.tables(owner) if reader.has(owner) else []):
        each = FieldReader(path=reader.path, table=table, prefix=f"{owner}[{index}].")
        name = each.text("name", choices=list_frameworks() if owner == "framework" else ())
        keys = [key for key in table if key != "name"]
        check_keys(owner, name, dict.fromkeys(keys, 0.0))
        found[name] = {key: each.number(key, least=-100) for key in keys}
    return found
