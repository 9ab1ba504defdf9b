"""The version of the package; the name of its distribution is another than that of its import."""

VERSION = "0.1.0"
"""As in ``pyproject.toml``, which reads it here."""
