"""The packages of ``hf_emopt``: which there are, and that imports lead only downward and never in a circle.

Every import counts, also one inside a function or under ``TYPE_CHECKING``. ``from package import name`` counts as an import
of the file that defines the name, so that an ``__init__`` that only re-exports ties nobody together.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Lowest first. Packages of one floor do not import each other.
FLOORS = [
    {"kernels", "routing", "formats"}, {"linalg"}, {"rules"}, {"distributed"}, {"state"}, {"engine"}, {"checkpoint"},
    {"optimizers"}, {"integrations"}, {"tools"},
]  # fmt: skip
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
# The root itself: the version is for everybody, `hf_emopt` imports up to the integrations, `run` imports `hf_emopt`.
ROOT_FILES = {"_version": -1, "__init__": FLOOR["integrations"] + 0.5, "run": len(FLOORS)}


def import_graph(root: Path, package: str) -> dict[str, set[str]]:
    """For every module of a package, by its dotted name: the modules of the package that it imports."""
    trees = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        trees[".".join(parts)] = ast.parse(path.read_text())

    def imported(module: str) -> list[tuple[str, str, str]]:
        """Module, name there, name here."""
        found = []
        for node in ast.walk(trees[module]):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
                found += [(node.module or "", alias.name, alias.asname or alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(alias.name, "", alias.asname or alias.name) for alias in node.names]
        return found

    def file_of(module: str) -> str | None:
        return next((name for name in (module, f"{module}.__init__") if name in trees), None)

    reexports = {
        (module.removesuffix(".__init__"), here): (source, there)
        for module in trees
        if module.endswith(".__init__")
        for source, there, here in imported(module)
    }

    def definition(module: str, name: str) -> str | None:
        while file_of(f"{module}.{name}") is None and (module, name) in reexports:
            module, name = reexports[module, name]
        return file_of(f"{module}.{name}") or file_of(module)

    graph = {}
    for module in trees:
        targets = {definition(source, there) for source, there, _ in imported(module)}
        graph[module] = {target for target in targets if target not in (None, module)}
    return graph


def floor(module: str) -> float:
    _, first, *rest = module.split(".")
    return FLOOR[first] if rest else ROOT_FILES[first]


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a higher floor, or of another package of the same one."""
    return [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in sorted(targets)
        if floor(target) > floor(module) or (floor(target) == floor(module) and package(module) != package(target))
    ]


def package(module: str) -> str:
    return module.split(".")[1]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_twelve_packages_and_three_files() -> None:
    found = list((ROOT / "hf_emopt").iterdir())
    assert {path.name for path in found if (path / "__init__.py").exists()} == set(FLOOR)
    assert {path.stem for path in found if path.suffix == ".py"} == set(ROOT_FILES)
    assert len(FLOOR) == 12


def test_imports_lead_downward_and_never_in_a_circle() -> None:
    graph = import_graph(ROOT, "hf_emopt")
    assert sum(map(len, graph.values())) > 300
    assert upward(graph) == []
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("files", "arrow", "round_trip"),
    [
        ({"rules/a.py": "from hf_emopt.engine import thing"}, "hf_emopt.rules.a imports hf_emopt.engine.b", False),
        ({"rules/a.py": "def f():\n    import hf_emopt.engine.b"}, "hf_emopt.rules.a imports hf_emopt.engine.b", False),
        ({"routing/a.py": "import hf_emopt.kernels.k"}, "hf_emopt.routing.a imports hf_emopt.kernels.k", False),
        (
            {"engine/c.py": "if TYPE_CHECKING:\n    from hf_emopt.engine.b import thing",
             "engine/b.py": "from hf_emopt.engine import c\nthing = 1"},
            None, True,
        ),
    ],
    ids=["through a re-export", "inside a function", "same floor", "for types"],
)  # fmt: skip
def test_the_graph_sees(tmp_path: Path, files: dict[str, str], arrow: str | None, round_trip: bool) -> None:
    plain = {
        "__init__.py": "", "kernels/__init__.py": "", "kernels/k.py": "", "engine/b.py": "thing = 1", "rules/__init__.py": "",
        "engine/__init__.py": "from hf_emopt.engine.b import thing",
    }  # fmt: skip
    for name, text in {**plain, **files}.items():
        path = tmp_path / "hf_emopt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = import_graph(tmp_path, "hf_emopt")
    assert upward(graph) == ([] if arrow is None else [arrow])
    assert bool(circle(graph)) == round_trip
