"""The order of the house: imports point down only, and each dependency stays in its rooms."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "elixir_fx"

# Floors, the lowest first. A module imports from its own room and from rooms of lower floors;
# rooms on one floor do not know each other.
FLOORS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"errors": ("errors",)},
    {
        "data": (
            "units",
            "facts",
            "catalogue",
            "machine",
            "formula",
            "demand",
            "explained",
            "plan",
        ),
    },
    {
        "planner": ("planner",),
        "runtime": ("runtime",),
        "ops": ("ops",),
        "step": ("step",),
        "report": ("report",),
    },
    {"verify": ("verify", "verify_memory"), "recycling": ("recycling",)},
    {"passes": ("passes",)},
    {
        "pipeline": ("pipeline",),
        "split": (
            "capture",
            "codegen",
            "compilation",
            "dynamo",
            "inductor",
            "joint",
            "kernels",
            "named_sizes",
            "step_cache",
        ),
    },
    {"options": ("config",)},
    {"lowering": ("lowering",)},
    {"team": ("team",)},
    {"session": ("session",)},
    {"guarded": ("guarded",), "regions": ("regions",)},
    {"module": ("module",)},
    {"api": ("api",), "backend": ("backend",)},
    {"sweep": ("sweep",)},
    {"testing": ("testing",), "front": ("__init__",)},
    {"cli": ("cli",)},
)
ROOMS = {name: room for floor in FLOORS for room, names in floor.items() for name in names}
LEVELS = {room: level for level, floor in enumerate(FLOORS) for room in floor}

WITHOUT_TORCH = {"errors", "data", "planner"}
# Rooms that may not import others although these are lower, and why.
CLOSED = {
    "passes": {"runtime": "a pass names operators, never their runtime", "planner": "a plan"},
    "verify": {"runtime": "it reads graphs", "planner": "it counts by itself"},
    "pipeline": {"runtime": "it runs passes", "planner": "it is given a plan"},
}
# Files that may use underscored names of torch; each says on which versions it was tried.
UNDERSCORES = {
    "capture.py",
    "compilation.py",
    "step_cache.py",
    "dynamo.py",
    "codegen.py",
    "inductor.py",
    "runtime/accumulation.py",
    "runtime/meter.py",
    "runtime/parameters.py",
}


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package, by its path from there; passes by their own folder."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    found = {}
    for file in files:
        inside = PACKAGE if PACKAGE in file.parents else ROOT
        found[file.relative_to(inside).as_posix()] = ast.parse(file.read_text())
    return found


def room_of(module: str) -> str:
    """The room of a module given as a path ("planner/pack.py") or by name ("planner.pack")."""
    return ROOMS[module.removesuffix(".py").replace("/", ".").split(".")[0]]


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported anywhere in a file, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module in ("elixir_fx", "elixir_fx.runtime"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def ours(tree: ast.Module) -> list[str]:
    names = [name for name in imports(tree) if name.startswith("elixir_fx.")]
    return [name.removeprefix("elixir_fx.") for name in names]


def test_every_module_has_a_room() -> None:
    for path in sources():
        assert path.removesuffix(".py").split("/")[0] in ROOMS, path


@pytest.mark.parametrize("path", sorted(sources()))
def test_imports_point_down(path: str) -> None:
    room = room_of(path)
    for name in ours(sources()[path]):
        if name.split(".")[0] not in ROOMS:
            continue  # `from elixir_fx import AwayParameter` and the like
        other = room_of(name)
        down = other == room or LEVELS[other] < LEVELS[room]
        assert down, f"{path} ({room}) imports {name} ({other})"
        assert other not in CLOSED.get(room, {}), f"{path} imports {name}: {CLOSED[room][other]}"


def test_no_two_modules_import_each_other() -> None:
    graph = networkx.DiGraph()
    for path, tree in sources().items():
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        graph.add_edges_from((module, name) for name in ours(tree) if name != module)
    assert not list(networkx.simple_cycles(graph))


@pytest.mark.parametrize("path", sorted(p for p in sources() if room_of(p) in WITHOUT_TORCH))
def test_plain_data_and_planner_know_no_torch(path: str) -> None:
    assert not [name for name in imports(sources()[path]) if name.split(".")[0] == "torch"]


def underscored(tree: ast.Module) -> Iterator[str]:
    """Underscored names of torch: imported, or reached by attributes; operators are data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != "torch" or parts[1] == "ops":
                continue
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


@pytest.mark.parametrize("path", sorted(sources()))
def test_underscored_torch_stays_in_its_files(path: str) -> None:
    found = sorted(set(underscored(sources()[path])))
    if path in UNDERSCORES:
        assert found, f"{path} uses none: take it off the list"
        text = ast.get_docstring(sources()[path]) or ""
        assert "2.11" in text and "2.13" in text, f"{path} must say what it was tried on"
    else:
        assert not found


def test_packages_are_listed() -> None:
    """A forgotten package is dropped from the wheel in silence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(("elixir_fx", *file.parent.relative_to(PACKAGE).parts))
        for file in PACKAGE.rglob("__init__.py")
    }
    assert listed == folders | {"elixir_fx.passes"}
    assert project["tool"]["setuptools"]["package-dir"]["elixir_fx.passes"] == "passes"
    assert (PACKAGE / "passes").resolve() == (ROOT / "passes").resolve()


def test_files_keep_to_their_length() -> None:
    for path in sources():
        file = (ROOT if path.startswith("passes/") else PACKAGE) / path
        assert len(file.read_text().splitlines()) <= 600, path


def test_no_module_level_mutable_state() -> None:
    """Law 6, as far as a parser sees it: no list, dict or set that is empty or filled later."""
    for path, tree in sources().items():
        for node in tree.body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            empty = (
                isinstance(value, (ast.List, ast.Dict, ast.Set)) and not ast.unparse(value)[1:-1]
            )
            assert not empty, f"{path}:{node.lineno}"
            called = isinstance(value, ast.Call) and ast.unparse(value.func)
            assert called not in ("dict", "list", "set", "defaultdict", "deque"), path
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path
