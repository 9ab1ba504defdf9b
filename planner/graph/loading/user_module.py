"""Importing a user's file or module without leaving traces in this process."""

import difflib
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.errors import ModelError

_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders of libraries, some of which add folders of their own to the path."""


@dataclass(slots=True)
class ImportScope:
    """The folder of a user's file, importable only while its code runs.

    The same holds of folders that the code adds to the path. Modules that come from them are kept
    here and leave ``sys.modules`` afterwards, so that two model files with a ``utils.py`` each do
    not see each other's.
    """

    folder: Path
    modules: dict[str, ModuleType] = field(default_factory=dict)
    front: list[str] = field(default_factory=list)
    """What is in front of the path while the code runs."""
    behind: list[str] = field(default_factory=list)
    """What is behind it."""

    def __post_init__(self) -> None:
        """Begin with the folder."""
        self.front.append(str(self.folder))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the folder importable."""
        modules, path = dict(sys.modules), list(sys.path)
        sys.path[:] = [*self.front, *path, *self.behind]
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self._leave_path(path)
            self._take_back(modules)

    def _leave_path(self, before: list[str]) -> None:
        """Take what the code has added off the path, apart from what its libraries have."""
        known, kept = Counter(before), list[str]()
        front, behind = list[str](), list[str]()
        is_behind = False
        for each in sys.path:
            if known[each]:
                known[each] -= 1
                is_behind = True
                kept.append(each)
            elif _INSTALLED.isdisjoint(Path(each).parts):
                (behind if is_behind else front).append(each)
            else:
                kept.append(each)
        self.front, self.behind, sys.path[:] = front, behind, kept

    def _take_back(self, before: dict[str, ModuleType]) -> None:
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            if name in self.modules or (top not in before and self._is_local(sys.modules.get(top))):
                self.modules[name] = module
        for name in self.modules:
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]

    def _is_local(self, module: ModuleType | None) -> bool:
        file = getattr(module, "__file__", None)
        if file is None:
            return False
        path = Path(file)
        own = path.parent.parent if path.name == "__init__.py" else path.parent
        return own.resolve() in {Path(each).resolve() for each in (*self.front, *self.behind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModule:
    """An imported file or module of the user."""

    target: str
    """As the user named it, without the factory."""
    file: str | None
    """Path as the user gave it, None for a module name."""
    module: str | None
    """Module name, None for a file."""
    namespace: dict[str, Any]
    """Its global names."""
    scope: ImportScope
    """Where its imports are found."""

    def own_callables(self) -> list[str]:
        """List the callables that the module defines itself."""
        own_name = self.namespace.get("__name__")
        return [
            name
            for name, thing in self.namespace.items()
            if callable(thing)
            and not name.startswith("_")
            and getattr(thing, "__module__", None) == own_name
        ]


def import_user_module(target: str, folder: Path | None = None) -> UserModule:
    """Import ``path/to/model.py`` or ``package.module``.

    Args:
        target: The file or module.
        folder: Folder that a module may lie in, None for the working directory.

    Raises:
        ModelError: There is no such file or module.
    """
    if target.endswith(".py") or "/" in target:
        return _import_file(target)
    scope = ImportScope(folder or Path.cwd())
    with scope.active():
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise
            raise _missing_module(target) from error
    return UserModule(target=target, file=None, module=target, namespace=vars(module), scope=scope)


def _import_file(target: str) -> UserModule:
    path = Path(target)
    if not path.is_file():
        raise _missing_file(path)
    resolved = path.resolve()
    scope = ImportScope(resolved.parent)
    name = path.stem if path.stem not in sys.modules else f"planner_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ModelError(f"{target} is no Python file.", hint="Give a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    scope.modules[name] = module
    with scope.active():
        spec.loader.exec_module(module)
    return UserModule(target=target, file=target, module=None, namespace=vars(module), scope=scope)


def _missing_file(path: Path) -> ModelError:
    folder = path.parent
    if path.is_dir():
        return ModelError(
            f"{path} is a folder, not a model file.",
            hint="Give the path of a Python file that offers build_model().",
        )
    if not folder.is_dir():
        return ModelError(
            f"Model file {path} does not exist: there is no folder {folder}.",
            hint="Give the path of a Python file that offers build_model().",
        )
    names = sorted(each.name for each in folder.glob("*.py"))
    near = difflib.get_close_matches(path.name, names, n=3) or names[:3]
    hint = "Give the path of a Python file that offers build_model()."
    if near:
        hint = "Did you mean " + " or ".join(str(folder / name) for name in near) + "?"
    return ModelError(f"Model file {path} does not exist.", hint=hint)


def _missing_module(target: str) -> ModelError:
    return ModelError(
        f"There is no file and no importable module {target!r}.",
        hint="Give path/to/model.py, path/to/model.py:factory, or package.module:factory of an"
        " installed package.",
    )
