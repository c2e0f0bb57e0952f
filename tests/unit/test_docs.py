"""What the pages name exists: notes, paths, modules, functions, measured rows, commands and their options."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import kvcover
from kvcover.real_backend.machine import trees
from kvcover.sim.cli import COMMANDS
from kvcover.sim.cli import kvcover as whole_group

MORIIO_FOLDER = "vllm/distributed/kv_transfer/kv_connector/v1/moriio"
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"])
ROOMS = ("sim", "faults", "real_backend", "kvcover", "tests", "docs", "benchmarks", "notebooks", "links", ".ci")
NOTE = re.compile(r"\b[KFN]\d{1,2}b?\b")
PATH = re.compile(rf"(?<![\w./<-])(?:{'|'.join(map(re.escape, ROOMS))})/[\w./*-]*(?::[A-Za-z_][\w.]*)?")
MODULE = re.compile(r"(?<![\w./-])kvcover(?:\.[A-Za-z_]\w*)+")
ROW = re.compile(r"`(…|\d+\.\d+\.\d+)/((?:write|read)/[^`]*)`")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
COMMAND = re.compile(r"(?<!from )(?<!-)\bkvcover ((?:[a-z][a-z-]*)(?: [^\n`#]*)?)")
VLLM = re.compile(r"(moriio_\w+\.py):(\w+)")


def written() -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".md", ".toml") and not any(each.is_symlink() for each in path.parents):
                yield path
    yield from (path for path in PAGES if path.parent == ROOT)


def every(pattern: re.Pattern[str]) -> list[object]:
    """One case a page and a thing that it names."""
    found = {(page, each.group(0)) for page in PAGES for each in pattern.finditer(page.read_text(encoding="utf-8"))}
    return [pytest.param(page, name, id=f"{page.relative_to(ROOT)}-{name}") for page, name in sorted(found)]


def test_every_note_that_is_cited_can_be_read() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    notes = re.findall(r'<a id="(\w+)"></a>(\w+)', page)
    assert all(anchor == name.lower() for anchor, name in notes)
    assert len(set(notes)) == len(notes), "a note stands there once"
    cited = {(path, note) for path in written() for note in NOTE.findall(path.read_text(encoding="utf-8"))}
    assert len(cited) > len(notes), "the search finds something"
    known = {name for _, name in notes}
    assert [f"{path.relative_to(ROOT)}: {note}" for path, note in sorted(cited) if note not in known] == []


@cache
def names_in(path: Path) -> set[str]:
    """Names that a module defines, a class's own as `Class.name`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in tree.body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            inner = [
                *node.body,
                *(each for method in node.body if isinstance(method, ast.FunctionDef) for each in ast.walk(method)),
            ]
            names |= {f"{node.name}.{name}" for each in inner for name in defined(each)}
    return names


def defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id if isinstance(each, ast.Name) else each.attr for each in targets if isinstance(each, ast.Name | ast.Attribute)}


@pytest.mark.parametrize(("page", "name"), every(PATH))
def test_a_path_exists_and_holds_what_is_named(page: Path, name: str) -> None:
    path, _, inside = name.rstrip(".").partition(":")
    if "*" in path:
        assert list(ROOT.glob(path)), name
        return
    assert (ROOT / path).exists(), name
    if inside:
        assert inside in names_in(ROOT / path), name


@pytest.mark.parametrize(("page", "name"), every(MODULE))
def test_a_module_exists_and_holds_what_is_named(page: Path, name: str) -> None:
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        home = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if home.exists():
            rest = ".".join(parts[count:])
            assert not rest or rest in names_in(home), name
            return
    assert parts[0] in dir(kvcover), name


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.parent for top in ("sim", "real_backend") for path in (ROOT / top).glob("*/__init__.py")]
    assert len(rooms) > 10
    assert [
        room.name for room in rooms if f"| `{room.relative_to(ROOT)}/" not in text and f", `{room.relative_to(ROOT)}/" not in text
    ] == []


def test_measured_rows_that_are_cited_were_measured() -> None:
    rows = {row["id"] for row in tomllib.loads((ROOT / "tests" / "data" / "measured.toml").read_text(encoding="utf-8"))["row"]}
    of_any = {row.partition("/")[2] for row in rows}
    cited = [(page.name, *each) for page in PAGES for each in ROW.findall(page.read_text(encoding="utf-8"))]
    assert cited
    assert [each for each in cited if not (each[2] in of_any if each[1] == "…" else f"{each[1]}/{each[2]}" in rows)] == []


def options_of(command: click.Command) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union({"--help"}, *(options_of(each) for each in inner_of(command).values()))


def inner_of(command: click.Command) -> dict[str, click.Command]:
    """The commands of a group, which may be loaded only when they are asked for."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: each for name, each in found.items() if each is not None}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    group = whole_group
    text = page.read_text(encoding="utf-8")
    code = "\n".join([*CODE.findall(text), *re.findall(r"^ {4}.*$", text, re.MULTILINE)]).replace("\\\n", " ")
    for line in COMMAND.findall(code):
        name, *words = line.split()
        assert name in COMMANDS, line
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group) and words:
            assert words[0] in inner_of(command), line
        asked = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z-]+(=.*)?", word)}
        assert asked <= options_of(command), line


@pytest.mark.vllm
def test_functions_of_vllm_that_are_cited_are_there() -> None:
    sources: dict[str, str] = {}
    for folder in (tree.path / MORIIO_FOLDER for tree in trees.trees() if tree.path is not None):
        for path in sorted(folder.glob("*.py")):
            sources[path.name] = sources.get(path.name, "") + path.read_text(encoding="utf-8")
    if not sources:
        pytest.skip("NOT RUN: no vLLM source tree (`kvcover vllm add`)")
    cited = {each for page in PAGES for each in VLLM.findall(page.read_text(encoding="utf-8"))}
    assert cited
    assert [each for each in sorted(cited) if not re.search(rf"\b(def|class) {each[1]}\b", sources.get(each[0], ""))] == []
