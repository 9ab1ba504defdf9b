"""Text from templates."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: object) -> str:
    """Fill a template of this package; a value that it lacks is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("planner", "export"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python, shell and YAML, no markup
    )
