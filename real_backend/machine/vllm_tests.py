"""vLLM's own unit tests of the MoRI-IO connector, run over the loopback `mori.io` or AMD's own.

The tests are in every release's source distribution, not in its wheels: they are fetched once into the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvcover.real_backend.inside.vllm_setup import HOST, LOOPBACK
from kvcover.real_backend.machine.mori import chosen
from kvcover.real_backend.machine.trees import cache, check_tree, find, refuse_other_release
from kvcover.sim import launch
from kvcover.sim.errors import TierError
from kvcover.sim.releases.records import get_release
from kvcover.sim.results.verdict import PASS, Verdict, fail, inconclusive

_UNIT = Path("tests/v1/kv_connector/unit")
_WANTED = ("tests/__init__.py", "tests/v1/__init__.py", "tests/v1/kv_connector/")
_EXAMPLES = "examples/disaggregated/disaggregated_serving/"  # the toy proxy, which some of the tests load
_DOWNLOAD_LIMIT_S = 600
_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class FileCount:
    """What came of the tests in one file."""

    file: str
    passed: int
    failed: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of one release's tests. `reasons` counts skipped tests by why, `failures` has a line each."""

    release: str
    files: tuple[FileCount, ...]
    reasons: dict[str, int]
    failures: tuple[str, ...]
    seconds: float

    def total(self, field: str) -> int:
        """Return the sum of `passed`, `failed` or `skipped`."""
        return sum(int(getattr(count, field)) for count in self.files)

    @property
    def verdict(self) -> Verdict:
        """A test that skips itself, as most that need ROCm do, is no failure; that none passed is no pass."""
        if failed := self.total("failed"):
            return fail(f"{failed} tests failed")
        return PASS if self.total("passed") else inconclusive("no test passed")


def find_tree(release: str, vllm: str | None) -> Path:
    """Return the vLLM tree to test: as `--vllm` says, else the release's.

    Raises InputError for a release that there is no record of, TierError if there is no tree.
    """
    get_release(release, "RELEASE")
    tree = find(vllm or release)
    if tree.identity.exact:
        refuse_other_release(tree, release, "--vllm")
    path = tree.path
    if path is None:
        spec = find_spec("vllm")
        assert spec is not None and spec.submodule_search_locations is not None  # find() has looked
        path = Path(next(iter(spec.submodule_search_locations))).parent
    return path


def find_tests(release: str, tree: Path) -> Path:
    """Return a folder with the release's `tests/`: the tree itself if it is a checkout, else from its sdist.

    Raises TierError if they can't be fetched.
    """
    if (tree / _UNIT).is_dir():
        return tree
    folder = cache().parent / "vllm-tests" / release
    if not (folder / _UNIT).is_dir():
        _fetch(release, folder)
    return folder


def _fetch(release: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{release}-") as work:
        command = launch.python("-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:")
        command += ["--dest", work, f"vllm=={release}"]
        own = launch.environment(VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=release, TMPDIR=work)
        with launch.Launched(command, env=own, folder=Path(work), stderr=subprocess.PIPE) as pip:
            try:
                _, errors = pip.output(_DOWNLOAD_LIMIT_S)
            except subprocess.TimeoutExpired:
                text = f"no sdist after {_DOWNLOAD_LIMIT_S} s"
                raise TierError(f"vllm-tests {release}", text, "try again, or --vllm PATH") from None
        archives = list(Path(work).glob("*.tar.gz"))
        if pip.process.returncode or not archives:
            said = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()[-1:]
            problem = f"pip can't fetch the sdist: {' '.join(said[:1])}"
            raise TierError(f"vllm-tests {release}", problem, "give a checkout of vLLM: --vllm PATH")
        unpacked = Path(work) / "unpacked"
        with tarfile.open(archives[0]) as archive:
            root = archive.getnames()[0].split("/")[0]
            wanted = tuple(f"{root}/{name}" for name in (*_WANTED, _EXAMPLES))
            members = [member for member in archive.getmembers() if member.name.startswith(wanted)]
            archive.extractall(unpacked, members=members, filter="data")
        if not (unpacked / root / _UNIT).is_dir():
            raise TierError(f"vllm-tests {release}", f"its sdist has no {_UNIT}", "give a checkout of vLLM: --vllm PATH")
        try:
            (unpacked / root).replace(folder)
        except OSError:
            if not (folder / _UNIT).is_dir():  # else another process was faster
                raise


def moriio_files(folder: Path) -> list[Path]:
    """Return the unit tests that have to do with MoRI-IO, relative to `folder`."""
    found = (folder / _UNIT).glob("test_*.py")
    return sorted(path.relative_to(folder) for path in found if "moriio" in path.read_text(encoding="utf-8").lower())


def run_tests(release: str, tree: Path) -> Tally:
    """Run the tests in a process of their own: `tree` is vLLM, `mori.io` what was chosen, conftest files are left out.

    Raises TierError if `tree` is no vLLM with this connector, or if something needed is missing.
    """
    check_tree(tree)
    missing = [name for name in ("torch", "zmq", "msgpack", "pytest") if find_spec(name) is None]
    if missing:
        raise TierError("vllm-tests", f"no {', '.join(missing)} here", "pip install 'kvcover[connector,test]'")
    folder = find_tests(release, tree)
    files = moriio_files(folder)
    if not files:  # pytest would run every test that it finds
        raise TierError("vllm-tests", f"no unit test of {release} has to do with MoRI-IO", "use a release from 0.24.0 on")
    with launch.work_folder() as work:
        report, pipe = work / "report.xml", subprocess.PIPE
        command = launch.python("-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)
        command += ["--rootdir", str(folder), "--continue-on-collection-errors", f"--junitxml={report}", *map(str, files)]
        with launch.Launched(command, cwd=folder, env=_environment(tree, work), folder=work, stdout=pipe, stderr=pipe) as pytest:
            said = " ".join("".join(pytest.output()).splitlines()[-_LAST_LINES:])
        if not report.exists():
            raise TierError(f"vllm-tests {release}", f"pytest gave no report: {said}", "run it again with a fresh environment")
        return _read(release, report, files)


def _environment(tree: Path, work: Path) -> dict[str, str]:
    kept = {key: value for key, value in launch.environment().items() if key != "PYTEST_ADDOPTS"}
    library = chosen()
    return kept | {
        "TMPDIR": str(work),
        "PYTHONPATH": os.pathsep.join((*([str(library.folder)] if library else []), str(LOOPBACK), str(tree.resolve()))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _read(release: str, report: Path, files: list[Path]) -> Tally:
    """Read pytest's XML. A file that can't be imported counts as one failure, a file skipped whole as one skip."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {path.stem: Counter[str]() for path in files}
    reasons: Counter[str] = Counter()
    failures = []
    for case in suite.findall("testcase") if suite is not None else ():
        # "tests.v1.….unit.test_file.TestClass", or for a whole file only the name has it
        parts = f"{case.get('classname', '')}.{case.get('name', '')}".split(".")
        file = next((part for part in parts if part in counts), "")
        skipped = case.find("skipped")
        failed = next((found for found in (case.find("failure"), case.find("error")) if found is not None), None)
        if failed is not None:
            failures.append(f"{file}::{case.get('name')}: {' '.join(failed.get('message', '').split())[:200]}")
        if skipped is not None:
            reasons[_reason(skipped)] += 1
        counts.setdefault(file, Counter())["failed" if failed is not None else "skipped" if skipped is not None else "passed"] += 1
    found = (FileCount(file, count["passed"], count["failed"], count["skipped"]) for file, count in counts.items())
    seconds = float(suite.get("time", "0")) if suite is not None else 0.0
    return Tally(release, tuple(found), dict(reasons.most_common()), tuple(failures), seconds)


def _reason(skipped: ElementTree.Element) -> str:
    """Return why a test was skipped; of a whole file only the text has it: ('path', line, 'Skipped: why')."""
    message, text = skipped.get("message", ""), skipped.text or ""
    return text.rsplit("Skipped: ", 1)[-1].rstrip("')\"") if "Skipped: " in text else message
