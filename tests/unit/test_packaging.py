"""What is installed: `kvcover` and nothing else, all of it, the same from every source; and nothing of the user's in its way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcover import __version__
from tests.unit.test_door import USER

ROOT = Path(__file__).parents[2]
ROOMS = ("sim", "faults", "real_backend")
COLLAPSE = ["run", "--release", "0.26.0", "--model", "layers=2,mla=8", "--prefill", "2", "--decode", "2", "--json"]
LIMIT_S = 300.0


def python(
    code: Sequence[str], cwd: Path, interpreter: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter, *code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- wheel and sdist ---------------------------------------------------------------------------------------------


def expected() -> dict[str, str]:
    """Every file of the package in this tree by its installed name, with its digest."""
    files = {f"kvcover/{path.name}": path for path in (ROOT / "kvcover").iterdir() if path.is_file()}
    for room in ROOMS:
        files |= {f"kvcover/{path.relative_to(ROOT)}": path for path in (ROOT / room).rglob("*") if path.is_file()}
    return {name: digest(path.read_bytes()) for name, path in files.items() if "__pycache__" not in name}


def in_wheel(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: digest(archive.read(name)) for name in archive.namelist()}


def in_sdist(sdist: Path) -> dict[str, str]:
    found = {}
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            assert member.isfile() or member.isdir(), f"{member.name} is a link"
            if file := archive.extractfile(member):
                found[member.name.partition("/")[2]] = digest(file.read())
    return found


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, with what lies about in a tree that is worked in."""
    pytest.importorskip("build", reason="NOT RUN: needs build (extra `lint`), and a package index")
    target = tmp_path_factory.mktemp("source") / "kvcover"
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))
    for litter in ("sim/__pycache__/cli.cpython-311.pyc", ".hypothesis/x", "tests/__pycache__/x.pyc", "sim/.mypy_cache/x.json"):
        (target / litter).parent.mkdir(exist_ok=True)
        (target / litter).write_bytes(b"")
    return target


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, built of the tree itself."""
    out = tmp_path_factory.mktemp("built")
    said(python(["-m", "build", "--sdist", "--wheel", "--outdir", str(out), "."], source))
    return out


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = in_wheel(wheel)
    own = {name: found for name, found in files.items() if not name.startswith("kvcover-")}  # but for the wheel's own .dist-info
    assert own == expected()
    assert "kvcover/py.typed" in files and "kvcover/real_backend/moriio/loopback/mori/io.py" in files
    assert len([name for name in files if name.startswith("kvcover/faults/corpus/") and name.endswith(".toml")]) > 50


def test_the_sdist_holds_the_package_and_nothing_else(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    files = in_sdist(sdist)
    package = {name.removeprefix("links/"): found for name, found in files.items() if name.startswith("links/kvcover/")}
    assert package == expected()
    others = {name for name in files if not name.startswith(("links/kvcover/", "links/kvcover.egg-info/"))}
    assert others == {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "setup.cfg"}


def test_a_wheel_of_the_sdist_is_the_same(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    said(python(["-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(sdist)], tmp_path))
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name and in_wheel(again) == in_wheel(wheel)


def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    home, there = tmp_path / "venv" / "bin", str(tmp_path / "venv" / "bin" / "python")
    own = {"PYTHONPATH": ""}
    said(python(["-m", "pip", "install", "-q", str(wheel)], tmp_path, there, **own))
    for start in ([str(home / "kvcover")], ["-m", "kvcover"]):
        assert said(python([*start, "--version"], tmp_path, there, **own)).split()[-1] == __version__
        assert json.loads(said(python([*start, *COLLAPSE], tmp_path, there, **own)))["coverage"] == 0.5
        said(python([*start, "corpus", "vllm-47764", "--check"], tmp_path, there, **own))
        found = said(python([*start, "explore", "--seeds", "100", "--jobs", "2", "--json"], tmp_path, there, **own))
        assert json.loads(found)["runs"] == 100
    where = said(python(["-c", "import kvcover.sim, sys; print(kvcover.sim.__file__)"], tmp_path, there, **own))
    assert where.startswith(str(tmp_path))
    if shutil.which("mypy", path=str(Path(sys.executable).parent)):
        (tmp_path / "user.py").write_text(USER)
        checked = ["-m", "mypy", "--strict", "--python-executable", there, "--cache-dir", str(tmp_path / "cache"), "user.py"]
        said(python(checked, tmp_path, PYTHONPATH=""))


def test_a_folder_without_metadata_is_enough(source: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "target", tmp_path / "work"
    work.mkdir()
    said(python(["-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(source)], work))
    for metadata in target.glob("*.dist-info"):
        shutil.rmtree(metadata)
    assert sorted(path.name for path in target.iterdir() if path.name != "bin") == ["kvcover"]
    matrix = ["matrix", "--release", "0.26.0", "--prefill", "1,2", "--decode", "2", "--mode", "write", "--json"]
    rows = said(python(["-m", "kvcover", *matrix], work, PYTHONPATH=str(target))).splitlines()
    assert len(rows) == 2
    where = said(python(["-c", "import kvcover.sim.cli as cli; print(cli.__file__)"], work, PYTHONPATH=str(target)))
    assert where.startswith(str(target))


# -- what else is called as we are -------------------------------------------------------------------------------

OURS = (
    "faults.py",
    "real_backend.py",
    "links.py",
    "sim/__init__.py",
    "tests/__init__.py",
    "kernel/__init__.py",
    "mori/__init__.py",
)
OTHERS = ("numpy.py", "msgspec.py", "simpy.py", "click.py", "rich.py", "multiprocessing/__init__.py")


def litter(folder: Path, names: Sequence[str]) -> Path:
    """A user's folder in which importing anything ends the program."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('{name} of the user was imported')")
    return folder


@pytest.fixture
def script(tmp_path: Path) -> str:
    """What pip writes as the command `kvcover`."""
    path = tmp_path / "bin" / "kvcover"
    path.parent.mkdir()
    path.write_text("import sys\nfrom kvcover.sim.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    return str(path)


EXPLORE = ["explore", "--seeds", "60", "--jobs", "2", "--json"]


@pytest.mark.parametrize(
    "words", [COLLAPSE, EXPLORE, ["corpus", "vllm-47764", "--release", "0.26.0", "--json"]], ids=lambda words: words[0]
)
def test_a_users_modules_are_not_ours(words: list[str], script: str, tmp_path: Path) -> None:
    """`python -m` puts the current folder first, so there only names that are ours can be told apart; the command doesn't."""
    (tmp_path / "module").mkdir()
    (tmp_path / "command").mkdir()
    elsewhere = python(["-m", "kvcover", *words], ROOT / "docs")
    as_module = python(["-m", "kvcover", *words], litter(tmp_path / "module", OURS))
    as_command = python([script, *words], litter(tmp_path / "command", (*OURS, *OTHERS)))
    assert "of the user" not in as_module.stdout + as_module.stderr + as_command.stdout + as_command.stderr
    assert elsewhere.returncode == as_module.returncode == as_command.returncode == 0
    for done in (as_module, as_command):
        assert [_timeless(line) for line in done.stdout.splitlines()] == [_timeless(line) for line in elsewhere.stdout.splitlines()]


def _timeless(line: str) -> dict[str, object]:
    return {key: value for key, value in json.loads(line).items() if key != "seconds"}


TWICE = """
import os, sys
from collections import Counter
import kvcover
from kvcover import Scenario, explore, run
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
import kvcover.real_backend.commands.doctor, kvcover.real_backend.tiers.connector, kvcover.real_backend.tiers.hardware

def twice():
    files = {name: os.path.realpath(m.__file__) for name, m in list(sys.modules.items()) if getattr(m, "__file__", None)}
    count = Counter(file for name, file in files.items() if name not in ("__main__", "__mp_main__"))
    return sorted(file for file, n in count.items() if n > 1 and file.startswith(os.path.realpath(os.getcwd())))

if __name__ == "__main__":
    run(Scenario())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        explore(60, executor=pool)
        print(pool.submit(twice).result(), twice())
    import sim.errors
    print([os.path.basename(file) for file in twice()])
"""


def test_no_module_is_there_twice_in_the_repository(tmp_path: Path) -> None:
    """Started at the root of the repository, where `sim` can be imported too; the last line says that twice would be seen."""
    script = tmp_path / "start.py"
    script.write_text(TWICE)
    start = f"import sys, runpy; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    code = "import sys; sys.path.insert(0, ''); " + start
    before = python(["-c", code], ROOT)
    assert said(before).splitlines() == ["[] []", "['__init__.py', 'errors.py']"]
