"""The order of the library: imports point down the floors, floor 0 needs no torch, nothing unsafe is loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "contrastors"
SCRIPTS = {path.stem: path for path in ROOT.glob("*.py")}

FLOORS = {
    # 0: no torch
    "records": 0, "images": 0, "validation": 0, "metrics": 0, "runlog": 0, "cli": 0,
    "shards": 0, "datacard": 0, "splits": 0, "sources": 0,
    "candidates": 0, "verdicts": 0, "vlm_messages": 0, "vlm": 0, "reviews": 0, "report": 0, "corpus": 0,
    "search_api": 0, "demo_judge": 0, "negatives": 0, "served": 0, "comparison": 0, "plots": 0, "swift_rows": 0,
    "train_flags": 0, "watch": 0,
    # 1: torch
    "rand_state": 1, "distributed": 1, "logit_scale": 1, "pixels": 1, "index": 1,
    # 2
    "loss": 2, "biqwen3": 2, "processing": 2, "data": 2,
    # 3
    "batches": 3, "evaluation": 3, "checkpoint": 3, "demo": 3, "loading": 3, "embeddings": 3,
    "mining": 3, "gates": 3, "chunking": 3,
    # 4: what a run of the trainer is made of
    "datasets": 4, "run_folder": 4, "resume": 4, "query_side": 4, "served_eval": 4,
    # 4 to 6: programs of their own, on top of the rest
    "export_files": 4, "checks": 4, "costs": 4, "swift": 4, "export_check": 5, "step_checks": 5, "plan": 5, "export": 6,
    "doctor": 6,
}  # fmt: skip
# Imports within a floor are a smell; these are all there are. records and images are the ground that floor 0 stands on.
SAME_FLOOR = {
    ("validation", "images"), ("validation", "records"), ("runlog", "records"), ("cli", "images"),
    ("shards", "records"), ("datacard", "records"),
    ("sources", "datacard"), ("sources", "records"), ("sources", "shards"), ("sources", "validation"),
    ("candidates", "images"), ("candidates", "records"), ("vlm_messages", "images"), ("vlm_messages", "verdicts"),
    ("vlm", "images"), ("vlm", "verdicts"), ("vlm", "vlm_messages"),
    ("reviews", "candidates"), ("reviews", "records"), ("reviews", "verdicts"), ("reviews", "vlm"),
    ("report", "candidates"), ("report", "images"), ("report", "records"), ("report", "verdicts"),
    ("corpus", "records"), ("demo_judge", "images"), ("demo_judge", "records"), ("search_api", "vlm"),
    ("served", "candidates"), ("served", "negatives"), ("served", "records"),
    ("evaluation", "batches"), ("embeddings", "batches"), ("mining", "embeddings"),
    ("loading", "checkpoint"), ("comparison", "metrics"), ("plots", "metrics"), ("plots", "records"),
    ("swift_rows", "images"), ("swift_rows", "records"),
    ("train_flags", "cli"), ("train_flags", "images"), ("train_flags", "metrics"), ("resume", "run_folder"),
}  # fmt: skip
MODULES = sorted({path.stem for path in LIBRARY.glob("*.py")} - {"__init__"})
HEAVY = ("torch", "torchvision", "transformers", "peft", "accelerate", "safetensors", "datasets")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def imported_modules(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at any depth; `from a import b` counts as a and as a.b."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def library_imports(path: Path) -> set[str]:
    return {parts[1] for name in imported_modules(path) if (parts := name.split("."))[0] == "contrastors" and parts[1:]}


def same_floor_pairs() -> set[tuple[str, str]]:
    return {
        (module, other)
        for module in MODULES
        for other in library_imports(LIBRARY / f"{module}.py")
        if FLOORS[other] == FLOORS[module]
    }


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(parse(path)) if isinstance(node, ast.Call))


def python_files() -> list[Path]:
    """Code of the project that runs on a user's machine."""
    return sorted([*SCRIPTS.values(), *LIBRARY.glob("*.py"), *(ROOT / "benchmarks").glob("**/*.py")])


def test_every_module_has_a_floor():
    missing = set(MODULES) - FLOORS.keys()
    assert not missing, f"tests/test_layers.py gives no floor to {missing}"
    assert not [path for path in LIBRARY.iterdir() if path.is_dir() and path.name != "__pycache__"]  # flat


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_to_lower_floors(module):
    up = {other for other in library_imports(LIBRARY / f"{module}.py") if FLOORS[other] > FLOORS[module]}
    assert not up, f"{module} (floor {FLOORS[module]}) imports from above: {up}"


def test_imports_within_a_floor_are_the_listed_ones_and_no_more():
    assert same_floor_pairs() == {pair for pair in SAME_FLOOR if pair[0] in MODULES}


def test_imports_within_a_floor_go_in_no_circle():
    graph: dict[str, set[str]] = {}
    for module, other in SAME_FLOOR:
        graph.setdefault(module, set()).add(other)
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", [name for name in MODULES if FLOORS.get(name) == 0])
def test_floor_zero_loads_no_torch_even_through_others(module):
    code = f"import sys, contrastors.{module}; print(*sorted(sys.modules.keys() & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stdout.split()


def test_what_stands_above_floor_zero_needs_torch():
    def needs_torch(name: str) -> bool:
        path = LIBRARY / f"{name}.py"
        return "torch" in imported_modules(path) or any(FLOORS[other] > 0 for other in library_imports(path))

    assert not [name for name in MODULES if FLOORS[name] > 0 and not needs_torch(name)]


@pytest.mark.parametrize("folder", [".", "tests", "benchmarks"])
def test_no_file_beside_a_script_hides_an_installed_module(folder):
    # Python puts the folder of a script first on its path: there tests/packaging.py would be transformers' packaging.
    ours = {path.stem for path in (ROOT / folder).glob("*.py")}
    installed = {name for name, owners in packages_distributions().items() if "contrastors-qwen3vl" not in owners}
    assert not ours & (installed | sys.stdlib_module_names) - {"__init__"}


def test_the_library_imports_no_script():
    for path in LIBRARY.glob("*.py"):
        assert not {name.split(".")[0] for name in imported_modules(path)} & SCRIPTS.keys(), path.name


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_scripts_import_no_other_script(script):
    assert not {name.split(".")[0] for name in imported_modules(SCRIPTS[script])} & SCRIPTS.keys()


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_nothing_runs_code_of_a_downloaded_checkpoint(path):
    for call in calls(path):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        where = f"{path.name}:{call.lineno}"
        if "trust_remote_code" in given:
            assert isinstance(given["trust_remote_code"], ast.Constant), where
            assert given["trust_remote_code"].value is False, where
        if ast.unparse(call.func) == "torch.load":
            assert "weights_only" in given and ast.unparse(given["weights_only"]) == "True", where
        assert ast.unparse(call.func) not in ("pickle.load", "pickle.loads", "eval", "exec"), where
    assert "trust_remote_code': True" not in ast.unparse(parse(path))
    assert "torch.load" not in imported_modules(path)  # under another name it would escape the check above


def test_the_map_of_the_library_names_every_module_on_its_floor_and_imports_nothing():
    tree = parse(LIBRARY / "__init__.py")
    assert len(tree.body) == 1, "contrastors/__init__.py holds its docstring alone"
    floors: dict[str, int] = {}
    floor = None
    for line in ast.get_docstring(tree).splitlines():
        if line.startswith("floor "):
            floor = int(line.split()[1].strip(","))
        elif not line.startswith(" "):
            floor = None
        if floor is not None:
            words = line.replace(",", " ").split()
            floors |= {word: floor for word in words if (LIBRARY / f"{word}.py").exists()}
    assert floors == {module: FLOORS[module] for module in MODULES}
