"""Unit conversions: the only 1024s and 1e9s of the program.

Inside, every quantity is SI: bytes are ``int``, time is ``float`` seconds, rates are per second.
Human units appear in profile files (converted on reading) and on screen (formatted here).
"""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
TERA = 10**12
MICRO = 1e-6

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by torch's name of the dtype."""


def gib_to_bytes(value_gib: float) -> int:
    """Convert GiB (2**30 bytes) to bytes."""
    return round(value_gib * GIB)


def gb_per_s_to_bytes_per_s(value_gb_per_s: float) -> float:
    """Convert GB/s (10**9 bytes per second) to bytes per second."""
    return value_gb_per_s * GB


def tflop_per_s_to_flop_per_s(value_tflop_per_s: float) -> float:
    """Convert TFLOP/s (10**12) to FLOP/s."""
    return value_tflop_per_s * TERA


def us_to_s(value_us: float) -> float:
    """Convert microseconds to seconds."""
    return value_us * MICRO


def memory_unit(largest_bytes: float) -> tuple[str, int]:
    """Return name and bytes of the unit in which a table shows memory, by its largest entry."""
    return ("GiB", GIB) if largest_bytes >= GIB else ("MiB", MIB)


def format_bytes(value_bytes: float) -> str:
    """Show bytes in the largest binary unit that keeps the number at or above 1."""
    sign = "-" if value_bytes < 0 else ""
    value = abs(value_bytes)
    for unit, scale in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= scale:
            return f"{sign}{value / scale:.1f} {unit}"
    return f"{sign}{value:.0f} B"


def format_s(value_s: float) -> str:
    """Show seconds as s, ms or us, three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value_s) >= scale:
            return f"{value_s / scale:.3g} {unit}"
    return f"{value_s * 1e6:.3g} us" if value_s else "0 s"


def format_flop(value: float) -> str:
    """Show floating-point operations with their decimal prefix: 7.17 PFLOP, 875 GFLOP."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}FLOP"
    return f"{_three_digits(value)} FLOP"


def format_count(value: float) -> str:
    """Show a large count with its decimal suffix: 8.03 B, 124 M, 31.1 k."""
    for suffix, scale in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"


def _three_digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
