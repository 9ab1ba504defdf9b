"""What is shipped is about the project: plain ASCII, no placeholders, no stray output."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = sorted((ROOT / "planner").rglob("*.py"))
TEXT = sorted(
    file
    for pattern in ("planner/**/*", "profiles/**/*", "examples/*", "docs/*", "tests/**/*", "*.md")
    for file in ROOT.glob(pattern)
    if file.is_file() and file.suffix in {".py", ".md", ".toml", ".csv", ".j2"}
)


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_there_is_something_to_check():
    assert len(SOURCE) > 20
    assert ROOT / "README.md" in TEXT


@pytest.mark.parametrize("file", TEXT, ids=name_of)
def test_text_is_ascii(file):
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        assert line.isascii(), f"{name_of(file)}:{number}: {line!r}"


@pytest.mark.parametrize("file", SOURCE, ids=name_of)
def test_code_has_no_placeholders(file):
    text = file.read_text(encoding="utf-8")
    for word in ("TODO", "FIXME", "XXX", "NotImplementedError"):
        assert word not in text, f"{name_of(file)} has {word}"


@pytest.mark.parametrize("file", SOURCE, ids=name_of)
def test_the_library_prints_nothing(file):
    if name_of(file).startswith("planner/runtime/"):
        return  # runs in the user's terminal, not in the library
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        is_print = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        )
        assert not is_print, f"{name_of(file)}:{node.lineno} prints"
