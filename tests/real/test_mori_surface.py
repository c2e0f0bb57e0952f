"""The loopback `mori.io` against the Python sources in the `amd-mori` wheel: same names, same parameters, same values.

Needs a package index; the wheel is read, never installed. What the wheel's C++ binding defines is compared by its headers.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LOOPBACK = Path(__file__).parents[2] / "real_backend" / "moriio" / "loopback" / "mori"
SOURCE = "\n".join((LOOPBACK / name).read_text().replace("from __future__ import annotations", "") for name in ("cpp.py", "io.py"))
WHEELS = (("310", "manylinux_2_35_x86_64"), ("312", "manylinux_2_39_x86_64"))
IMPORTED = (
    "BackendType",
    "EngineDesc",
    "IOEngine",
    "IOEngineConfig",
    "MemoryDesc",
    "PollCqMode",
    "RdmaBackendConfig",
    "XgmiBackendConfig",
)
"""What the connector of every release imports from `mori.io`."""
USED = {
    "IOEngine": (
        "__init__",
        "create_backend",
        "get_engine_desc",
        "register_remote_engine",
        "register_torch_tensor",
        "create_session",
        "allocate_transfer_uid",
    ),
    "IOEngineSession": ("batch_read", "batch_write", "read", "write"),
}
BATCH = {"batch_read": "_batch_single_side_transfer", "batch_write": "_batch_single_side_transfer"}
SINGLE = {"read": "_single_side_transfer", "write": "_single_side_transfer"}
ENUMS = ("BackendType", "MemoryLocationType", "StatusCode", "PollCqMode")

pytestmark = pytest.mark.slow
Classes = dict[str, dict[str, ast.FunctionDef]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    said = ""
    for python, platform in WHEELS:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        command += ["--python-version", python, "--platform", platform, "amd-mori"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        for path in folder.glob("amd_mori-*.whl"):
            return zipfile.ZipFile(path)
        said = " ".join(done.stderr.split())[-200:]
    pytest.skip(f"NOT RUN: no amd-mori wheel to compare with: {said}")


def text_of(wheel: zipfile.ZipFile, ending: str) -> str:
    return next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith(ending))


def classes_in(source: str) -> Classes:
    return {
        node.name: {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def parameters(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args)]


def required(function: ast.FunctionDef) -> int:
    return len(parameters(function)) - len(function.args.defaults)


@pytest.fixture(scope="module")
def ours() -> Classes:
    return classes_in(SOURCE)


@pytest.fixture(scope="module")
def theirs(wheel: zipfile.ZipFile) -> Classes:
    return classes_in(text_of(wheel, "mori/io/engine.py"))


def test_all_that_the_connector_imports_is_in_both(ours: Classes, wheel: zipfile.ZipFile) -> None:
    exported = text_of(wheel, "mori/io/__init__.py") + text_of(wheel, "mori/io/engine.py")
    assert [name for name in IMPORTED if name not in ours] == []
    assert [name for name in IMPORTED if not re.search(rf"\b{name}\b", exported)] == []


@pytest.mark.parametrize("name", ["IOEngine", "IOEngineSession"])
def test_every_public_method_of_ours_is_a_method_of_theirs(name: str, ours: Classes, theirs: Classes) -> None:
    public = [method for method in ours[name] if not method.startswith("_")]
    assert [method for method in public if method not in theirs[name]] == []


@pytest.mark.parametrize(("name", "method"), [(name, method) for name, methods in USED.items() for method in methods])
def test_parameters_are_the_same(name: str, method: str, ours: Classes, theirs: Classes) -> None:
    mine, real = ours[name][method], theirs[name][method]
    if real.args.vararg is None:
        assert parameters(mine) == parameters(real)
        assert required(mine) == required(real)
        return
    # a session passes its arguments on, by position only
    target = theirs[name][(BATCH | SINGLE)[method]]
    assert parameters(target)[:2] == ["self", "func"]
    assert parameters(mine)[1:] == parameters(target)[2:]
    assert required(mine) == len(parameters(mine))
    assert [each.arg for each in mine.args.posonlyargs] == parameters(mine), "the real one takes no keywords"


@pytest.mark.parametrize("method", ["wait_all", "deregister_remote_engine", "deregister_memory"])
def test_parameters_that_no_release_uses_yet_are_the_same(method: str, ours: Classes, theirs: Classes) -> None:
    mine, real = ours["IOEngine"][method], theirs["IOEngine"][method]
    assert parameters(mine) == parameters(real)
    assert required(mine) == required(real)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_values_of_the_header(name: str, wheel: zipfile.ZipFile) -> None:
    header = text_of(wheel, "include/mori/io/enum.hpp")
    body = re.search(rf"enum class {name}\b[^{{]*{{(.*?)}}", header, re.DOTALL)
    assert body is not None
    real = {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", body.group(1))}
    tree = ast.parse(SOURCE)
    enum = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    mine = {
        target.id: part.value.value
        for part in enum.body
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)
        for target in part.targets
        if isinstance(target, ast.Name)
    }
    real.pop("ERR_BEGIN", None)  # a bound between codes that the binding doesn't show
    assert mine == real


@pytest.mark.parametrize("name", ["RdmaBackendConfig", "XgmiBackendConfig"])
def test_settings_have_the_fields_and_defaults_of_the_header(name: str, wheel: zipfile.ZipFile) -> None:
    """The binding takes them by position in the order of the C++ constructor: our fields are a prefix of it."""
    header = text_of(wheel, "include/mori/io/backend.hpp")
    body = re.search(rf"struct {name}\b.*?{{(.*?)\n}};", header, re.DOTALL)
    assert body is not None
    real = re.findall(r"^\s+(?:int|bool|PollCqMode)\s+(\w+){(-?[\w:]+)}", body.group(1), re.MULTILINE)
    tree = ast.parse(SOURCE)
    struct = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [part for part in struct.body if isinstance(part, ast.AnnAssign) and part.value is not None]
    mine = [(ast.unparse(part.target), ast.unparse(part.value)) for part in fields if part.value is not None]
    assert [snake(field) for field, _ in real][: len(mine)] == [field for field, _ in mine]
    wanted = [value.replace("::", ".").replace("true", "True").replace("false", "False") for _, value in real]
    assert [value for _, value in mine] == wanted[: len(mine)]


@pytest.mark.parametrize(("name", "header"), [("EngineDesc", "common.hpp"), ("MemoryDesc", "common.hpp")])
def test_descriptors_have_the_first_fields_of_the_wire_form(name: str, header: str, wheel: zipfile.ZipFile) -> None:
    body = re.search(rf"struct {name}\b.*?{{(.*?)\n}};", text_of(wheel, f"include/mori/io/{header}"), re.DOTALL)
    assert body is not None
    packed = re.search(r"MSGPACK_DEFINE\(([^)]*)\)", body.group(1))
    assert packed is not None
    real = [snake(field.strip()) for field in packed.group(1).split(",")]
    tree = ast.parse(SOURCE)
    struct = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    mine = [ast.unparse(part.target) for part in struct.body if isinstance(part, ast.AnnAssign)]
    assert mine == real[: len(mine)]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
