"""The docs name what is there: flags, metrics, files of a run, the README's file tree, links; no machine's paths."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import make_colour_set
from tests.runs import arguments, train

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def read(path: Path) -> str:
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    return path.read_text(encoding="utf-8")


def first_cells(text: str) -> list[tuple[str, str]]:
    """The first two cells of every table row whose first cell holds code."""
    return re.findall(r"^\| (`[^|]+?) \| ([^|]+?) \|", text, flags=re.MULTILINE)


def codes(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("page", sorted((ROOT / "benchmarks" / "results").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_of_results_names_its_command_and_the_commit_that_was_measured(page):
    text = read(page)
    assert re.search(r"\bcommit `[0-9a-f]{7}`", text) and re.search(r"`[^`]*(?:python|make) [^`]+`", text)


# ------------------------------------------------------------------------------------------------ flags, metrics, files


@pytest.fixture(scope="module")
def run_folder(tiny_model, tmp_path_factory) -> Path:
    """A real short run: hard negatives, evaluation at both ends, one row skipped."""
    data = make_colour_set(tmp_path_factory.mktemp("docs"))
    (data / "c11.png").write_bytes(b"no image")
    assert train(arguments(tiny_model, data, data / "run", num_hard_negatives=2, max_bad_fraction=0.2)) == 0
    return data / "run"


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_flag_of_training_stands_in_the_docs_with_its_default_and_no_other_does():
    from train_contrastors import build_parser

    actions = [a for a in build_parser()._actions if not isinstance(a, argparse._HelpAction)]
    defaults = {action.option_strings[0]: action.default for action in actions}
    tables = read(DOCS / "train_contrastors.md").split("## Flags")[1].split("## Metrics")[0]
    cells = [(codes(name)[0], shown) for name, shown in first_cells(tables)]
    assert [name for name, _ in cells] == list(defaults)
    for name, shown in cells:
        default = defaults[name]
        if isinstance(default, bool):
            assert shown == ("on" if default else "off"), name
        elif isinstance(default, (int, float)):
            assert float(shown) == default, name
        elif default is not None:
            assert shown == default, name


def test_every_metric_of_a_run_is_explained_in_the_docs_and_no_other_is(run_folder):
    written = {key for row in rows_of(run_folder / "metrics.jsonl") for key in row}
    text = read(DOCS / "train_contrastors.md").split("## Metrics")[1].split("\n## ")[0]
    explained = [code for name, _ in first_cells(text) for code in codes(name)]
    assert {"train/loss", "eval/recall@1_low", "time/step_s"} <= written
    assert sorted(explained) == sorted(written)


@pytest.mark.parametrize(
    ("file", "heading"),
    [("eval_step4.jsonl", "### eval_stepN.jsonl"), ("bad_rows.jsonl", "### bad_rows.jsonl"),
     ("summary.json", "### summary.json"), ("checkpoint-4/trainer_state.json", "## Checkpoint folder"),
     ("best.json", "## Run folder"), ("env.json", "## Run folder")],
)  # fmt: skip
def test_every_key_of_a_run_s_files_stands_in_the_data_formats(run_folder, file, heading):
    path = run_folder / file
    row = rows_of(path)[0] if file.endswith("jsonl") else json.loads(path.read_text(encoding="utf-8"))
    text = read(DOCS / "data_formats.md").split(f"\n{heading}\n")[1].split("\n## ")[0]
    missing = row.keys() - set(codes(text))
    assert not missing, f"{file} has keys that docs/data_formats.md does not name: {sorted(missing)}"


def test_every_file_of_a_run_stands_in_the_data_formats(run_folder):
    named = set(codes(read(DOCS / "data_formats.md")))
    found = {re.sub(r"\d+", "N", path.name) + "/" * path.is_dir() for path in run_folder.iterdir()}
    found |= {path.name for path in (run_folder / "checkpoint-4").iterdir()}
    assert found <= named, f"docs/data_formats.md does not name {sorted(found - named)}"


def test_every_script_has_its_page():
    missing = [path.stem for path in ROOT.glob("*.py") if not (DOCS / f"{path.stem}.md").is_file()]
    assert not missing, f"docs/ lacks a page for {missing}"


# ----------------------------------------------------------------------------------------------- the README's file tree


def files_block(readme: str) -> str:
    """Returns the code block under `## Files`."""
    section = re.search(r"^## Files\n(.*?)(?=^## |\Z)", readme, flags=re.MULTILINE | re.DOTALL)
    assert section, "README.md needs a section '## Files'"
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", section[1], flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"README.md: '## Files' needs one ``` block, it has {len(blocks)}"
    return blocks[0]


def named_paths(block: str) -> list[str]:
    """Returns the paths that the lines of a file tree begin with; deeper lines belong to the folder above them.

    A name ends in / or has an extension, or is a file of the root (Makefile); several may stand with commas between
    them. Other lines are comments.
    """
    paths, folders = [], []
    for line in re.sub("[│├└─]", " ", block).splitlines():
        indent = len(line) - len(line.lstrip())
        folders = [(depth, name) for depth, name in folders if depth < indent]
        start = re.match(r"[\w.*/-]+(?:, ?[\w.*/-]+)*", line.strip())
        for name in start[0].replace(",", " ").split() if start else ():
            if not (name.endswith("/") or re.search(r"\.\w+$", name) or (ROOT / name).is_file()):
                continue
            paths.append("".join(folder for _, folder in folders) + name)
            if name.endswith("/"):
                folders.append((indent, name))
    return paths


def complaints(readme: str) -> list[str]:
    """Returns what is wrong with the README's file tree."""
    counts = Counter(named_paths(files_block(readme)))
    wanted = [path.name for path in ROOT.glob("*.py")] + [
        f"contrastors/{p.name}" for p in ROOT.glob("contrastors/*.py")
    ]
    found = [f"{path} is not named" for path in sorted(wanted) if not counts[path]]
    found += [f"{path} is named {number} times" for path, number in counts.items() if number > 1]
    return found + [f"{path} does not exist" for path in counts if not any(ROOT.glob(path.rstrip("/")))]


def test_the_readme_s_file_tree_names_every_script_and_module_once_and_nothing_else():
    found = complaints(read(ROOT / "README.md"))
    assert not found, "README.md, section Files: " + "; ".join(found)


def test_a_wrong_file_tree_is_noticed():
    scripts = [path.name for path in sorted(ROOT.glob("*.py"))]
    modules = [path.name for path in sorted(ROOT.glob("contrastors/*.py"))]
    tree = [f"{name:30} words" for name in scripts] + ["contrastors/   the library", "               in words"]
    tree += [f"  {name:28} words about records.py" for name in modules] + ["tests/", "Makefile, LICENSE    both"]

    def readme(lines: list[str]) -> str:
        return "\n".join(["# Title", "", "## Files", "", "```", *lines, "```", "", "## More", ""])

    assert complaints(readme(tree)) == []
    assert complaints(readme(tree[1:])) == [f"{scripts[0]} is not named"]
    assert complaints(readme([*tree, "  runs.py", "tests/runs.py"])) == ["runs.py does not exist"]
    assert complaints(readme([*tree, tree[0]])) == [f"{scripts[0]} is named 2 times"]
    assert complaints(readme([*tree, "train_later.py   soon"])) == ["train_later.py does not exist"]
    assert complaints(readme([line for line in tree if "loss.py" not in line])) == ["contrastors/loss.py is not named"]
    with pytest.raises(AssertionError, match="## Files"):
        complaints("# Title\n")
    with pytest.raises(AssertionError, match="one ``` block"):
        complaints("## Files\n\nwords\n")


# --------------------------------------------------------------------------------------------------------- links, paths


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_project_that_a_page_names_exist(page):
    for code in codes(read(page)):
        if re.fullmatch(r"(docs|contrastors|tests|recipes|benchmarks)/[\w/.-]+\.\w+", code):
            assert (ROOT / code).is_file(), f"{page.name} names `{code}`, which does not exist"


def test_the_pages_that_others_rely_on_are_there():
    pages = ("glossary", "data_formats", "training_dev_notes", "train_contrastors", "design", "gradcache_training")
    assert not [name for name in pages if not (DOCS / f"{name}.md").is_file()]


PLACES = ("home", "Users", "root", "work", "opt", "mnt", "scratch", "workspace", "tmp")
MACHINE_PATH = re.compile(rf"(?<![\w.])/(?:{'|'.join(PLACES)})/[\w.-]+|\b[A-Z]:\\\w+")


def test_no_tracked_file_names_a_place_of_somebody_s_machine():
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; deleted but not committed
            continue
        found += [f"{name}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert not found


def test_a_machine_path_is_noticed():
    slash, back = "/", "\\"
    assert MACHINE_PATH.search(f"see {slash}home/me/tiles") and MACHINE_PATH.search(f'"{slash}opt/data"')
    assert MACHINE_PATH.search(f"C:{back}data")
    assert not MACHINE_PATH.search("tests/work/a, training/tmp/b, https://x.org/home/c, /usr/bin/env, /dev/shm")
