"""What a script needs of the user's own code: copies of it, and the packages that it imports.

Files that the code imports are found from its source: its own folder's modules, and theirs in turn.
What it imports in other ways (``importlib``, other folders on ``sys.path``) and data files that it
reads cannot be known.
"""

import ast
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path, PurePosixPath

from planner.codegen.source import quote
from planner.errors import CodegenError
from planner.graph.loading.own_place import COPIES_FOLDER, asks_for_its_place
from planner.plan.types import ModelRef

CONFIG_MODEL_FILE = Path(__file__).parents[1] / "graph" / "loading" / "hf_model.py"
"""The model file of every Hugging Face config, copied as it is."""

CONFIG_MODEL_NAME = "model.py"
"""Its name beside the script."""

_RUNTIME = "runtime"
"""The package of the script's own that a module of the user would hide behind."""

_HERE = "Path(__file__).resolve().parent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The user's code as a script uses it."""

    arguments: tuple[str, ...]
    """Arguments of the runtime's ``UserModel`` that say where it is, as source text."""
    copies: Mapping[str, str]
    """Text of each copied file, by its path beside the script."""
    packages: frozenset[str]
    """Packages that it imports from elsewhere, torch always."""
    loads_data: bool = True
    """Whether it may have a ``data_loader``: so where its source is not known, or may get one."""

    @property
    def provenance(self) -> list[str]:
        """Name each copy with the sha256 of its text."""
        return [
            f"{name} {hashlib.sha256(text.encode()).hexdigest()}"
            for name, text in self.copies.items()
        ]

    def requirements(self) -> str:
        """Pin the distributions of the packages that are installed here, as pip reads it."""
        known = packages_distributions()
        names = {name for package in self.packages for name in known.get(package, ())}
        # A local version, "2.13.0+cpu", is of this machine.
        pins = (f"{name}=={version(name).partition('+')[0]}\n" for name in sorted(names))
        return "# What the plan was made with\n" + "".join(pins)


def model_files(model: ModelRef, folder: Path | None) -> ModelFiles:
    """Find and read the user's code.

    Args:
        model: Where it is.
        folder: Where the script will lie, None where that is not known.

    Raises:
        CodegenError: A file is gone, or is named as the script's own package.
    """
    if model.is_config:
        copies = {
            CONFIG_MODEL_NAME: CONFIG_MODEL_FILE.read_text(encoding="utf-8"),
            "config.json": _text(Path(str(model.file))),
        }
        argument = f"file={_HERE} / {quote(CONFIG_MODEL_NAME)}"
        return ModelFiles(
            arguments=(argument,), copies=copies, packages=frozenset({"torch", "transformers"})
        )
    if model.file is not None:
        path = Path(model.file).resolve()
        sources = _Sources(path.parent)
        sources.add(path)
        original = _original(sources, path, folder)
        return sources.found((f"file={_copy_of(path.name)}",), original=original)
    module = str(model.module)
    top = module.partition(".")[0]
    argument = f"module={quote(module)}"
    if top in packages_distributions():
        return ModelFiles(arguments=(argument,), copies={}, packages=frozenset({"torch", top}))
    sources = _Sources(_root_of(module))
    sources.add_module(module)
    return sources.found((argument, f"folder={_HERE} / {quote(COPIES_FOLDER)}"))


def _copy_of(name: str) -> str:
    return f"{_HERE} / {quote(f'{COPIES_FOLDER}/{name}')}"


def _original(sources: "_Sources", path: Path, folder: Path | None) -> str | None:
    """Name the original of a file where some of the code looks for what lies beside it."""
    if not sources.looks_around:
        return None
    if folder is None:
        return f"original=Path({quote(path.as_posix())})"
    relative = Path(os.path.relpath(path, folder.resolve())).as_posix()
    return f"original={_HERE} / {quote(relative)}"


def _root_of(module: str) -> Path:
    """Folder on the path that a module which belongs to no distribution lies in.

    Raises:
        CodegenError: It is not there.
    """
    top = module.partition(".")[0]
    spec: ModuleSpec | None = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
    if not places:
        raise CodegenError(
            f"the script needs a copy of the module {module}, which is not found any more",
            hint="plan again from the folder that it lies in",
        )
    return Path(places[0]).resolve().parent


class _Sources:
    """Files below one folder that import one another."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._texts: dict[Path, str] = {}
        self._packages: set[str] = {"torch"}
        self.looks_around = False
        """Whether some code asks for its own place."""
        self._names_data_loader = False

    def found(self, arguments: tuple[str, ...], *, original: str | None = None) -> ModelFiles:
        """Return what was found."""
        copies = {
            f"{COPIES_FOLDER}/{path.relative_to(self._root).as_posix()}": text
            for path, text in sorted(self._texts.items())
        }
        return ModelFiles(
            arguments=arguments if original is None else (*arguments, original),
            copies=copies,
            packages=frozenset(self._packages),
            loads_data=self._names_data_loader,
        )

    def add(self, path: Path) -> None:
        """Add a file and what it imports from the folder."""
        if path in self._texts:
            return
        self._texts[path] = _text(path)
        tree = ast.parse(self._texts[path])
        self.looks_around |= asks_for_its_place(tree)
        self._names_data_loader |= "data_loader" in self._texts[path]
        package = path.relative_to(self._root).parent.parts
        for name in _imported(tree, package):
            self.add_module(name)

    def add_module(self, name: str) -> None:
        """Add a module with the packages around it; what lies elsewhere is noted.

        Raises:
            CodegenError: It has the name of the script's own package.
        """
        parts = name.split(".")
        if not self._files(parts[0]):
            self._packages.add(parts[0])
            return
        if parts[0] == _RUNTIME:
            raise CodegenError(
                f"the model imports {_RUNTIME} from its own folder {self._root}, and the script "
                "has a package of that name beside it",
                hint="give the module another name",
            )
        for end in range(1, len(parts) + 1):
            for file in self._files("/".join(parts[:end])):
                if file.is_file():
                    self.add(file)

    def _files(self, name: str) -> list[Path]:
        """What a name may stand for: a module, a package, or a folder without ``__init__``."""
        place = self._root / PurePosixPath(name)
        file = place.with_name(f"{place.name}.py")
        init = place / "__init__.py"
        if init.is_file():
            return [init]
        if file.is_file():
            return [file]
        return [place] if place.is_dir() and any(place.rglob("*.py")) else []


def _imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Name what may be modules in the imports of a source, wherever they stand.

    Args:
        tree: The source.
        package: Names of the packages that it lies in.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*around, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if base else alias.name


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CodegenError(
            f"the script needs a copy of {file}, which cannot be read: {reason}",
            hint="put it back, or plan again with its new path",
        ) from error
