"""Text from the templates of the package."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: object) -> str:
    """Fill a template; values are escaped in HTML, and taken as they are in any other language.

    Args:
        template: Its path inside the package, as "export/slurm.sh.j2".
        values: What the template asks for; one that it lacks is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("planner", ""),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
