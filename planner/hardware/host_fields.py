"""The table of a cluster profile that says what its hosts can hold for their devices."""

from planner.hardware.fields import FieldReader
from planner.hardware.spec import HostSpec
from planner.units import gb_per_s_to_bytes_per_s, gib_to_bytes

_HOST = "host"


def read_host(reader: FieldReader, gpus_per_node: int) -> HostSpec | None:
    """Read what hosts give each device, None where the profile does not say.

    Args:
        reader: Of the cluster's profile.
        gpus_per_node: Devices that share a host's memory, at least 1.

    Raises:
        ProfileError: A field is wrong.
    """
    if not reader.has(_HOST):
        return None
    own = FieldReader(path=reader.path, table=reader.one_table(_HOST), prefix=f"{_HOST}.")
    link_gb_per_s = own.positive("copies_peak_gb_per_s_per_gpu")
    link_gb_per_s *= own.positive("copies_achieved_fraction", most=1.0)
    memory_gb_per_s = own.positive("memory_bandwidth_gb_per_s")
    memory_gb_per_s *= own.positive("optimizer_fraction_of_bandwidth", most=1.0)
    host = HostSpec(
        memory_bytes=gib_to_bytes(own.positive("memory_gib")) // max(gpus_per_node, 1),
        link_bytes_per_s=gb_per_s_to_bytes_per_s(link_gb_per_s),
        memory_bandwidth_bytes_per_s=gb_per_s_to_bytes_per_s(memory_gb_per_s)
        / max(gpus_per_node, 1),
        numbers=own.numbers,
    )
    own.finish()
    return host
