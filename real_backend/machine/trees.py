"""vLLM source trees: where they are, how one is added, and which one a run uses.

A release is installed without kernels into a cache of the user's (`$KVCOVER_CACHE`, else `$XDG_CACHE_HOME/kvcover`, else
`~/.cache/kvcover`), never over anything. `$KVCOVER_TREES` may name one more folder with a tree a release.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER, connector_files, tree_version, user_cache, version_file
from kvcover.real_backend.machine.adding import locked, pip_error, run_logged
from kvcover.real_backend.machine.identity import Identity, identify, number_of
from kvcover.sim import launch
from kvcover.sim.errors import InputError, TierError, short
from kvcover.sim.releases.records import ALIASES, NEWEST, RELEASES

_BUILD_NEEDS = ("torch", "setuptools", "setuptools_scm", "setuptools_rust", "wheel", "jinja2", "packaging")
_RUN_NEEDS = ("torch", "zmq", "msgpack", "transformers", "pydantic", "numpy")
_TOLD = re.compile(r"^\s*(Collecting|Downloading|Using cached|Preparing|Building|Created|Installing|Successfully)")
_RELEASE = re.compile(r"\d+\.\d+\.\d+\w*")
_EXTRA = "pip install 'kvcover[connector]'"


@dataclass(frozen=True, slots=True)
class Tree:
    """One vLLM. `path` None means the installed one; `version`, without what stands after a `+`, is None if nothing says it.

    `files` are the names and hashes of its connector's files, which say what it is.
    """

    path: Path | None
    version: str | None
    kind: str  # cache, folder, working copy or installed
    files: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """What `--vllm` would be given."""
        return (
            "installed" if self.path is None else self.version or str(self.path) if self.kind != "working copy" else str(self.path)
        )

    @property
    def identity(self) -> Identity:
        """Which release's connector it has."""
        return identify(dict(self.files), self.version)

    @property
    def label(self) -> str:
        """What it calls itself and, where that is something else, what its files say."""
        known, said = self.identity, self.version
        if said is not None and known.exact and number_of(said) == known.release:
            return said
        return f"{f'vLLM {said}' if said else 'a vLLM of no known version'} ({known.text} by its connector's files)"


def cache() -> Path:
    """The folder of the trees that `kvcover vllm add` installs."""
    return user_cache() / "vllm"


def trees() -> list[Tree]:
    """Every tree that is known here, releases in order, then working copies."""
    found: dict[Path, Tree] = {}
    for folder, kind in ((os.environ.get("KVCOVER_TREES"), "folder"), (cache(), "cache")):
        for path in sorted(Path(folder).glob("[0-9]*")) if folder else ():
            if (path / MORIIO_FOLDER).is_dir():
                found.setdefault(path.resolve(), _tree(path, tree_version(path) or path.name, kind))
    releases = sorted(found.values(), key=lambda tree: [int(part) for part in re.findall(r"\d+", tree.version or "")])
    copies = [_tree(path, tree_version(path), "working copy") for path in _working_copies() if (path / MORIIO_FOLDER).is_dir()]
    return releases + copies


def _tree(path: Path, version: str | None, kind: str) -> Tree:
    return Tree(path, version, kind, tuple(connector_files(path).items()))


def choose(vllm: str | None, release: str, decode_release: str | None) -> tuple[Tree, Tree]:
    """The trees of prefill and decode: as `--vllm` says, else those of the scenario's releases.

    Raises TierError naming what to do when there is none.
    """
    if vllm is None:
        prefill = find(release)
        return prefill, prefill if decode_release in (None, release) else find(str(decode_release))
    parts = vllm.split(",")
    if len(parts) > 2 or not all(parts):
        raise InputError("--vllm", f"can't read {vllm!r}", "give one vLLM, or two as PREFILL,DECODE")
    return find(parts[0]), find(parts[-1])


def find(text: str) -> Tree:
    """The tree of a release, at a path, or the installed one."""
    if text == "installed":
        return installed()
    path = path_of(text, "--vllm")
    if os.sep in text or (path.is_dir() and not is_release(text)):  # ./0.33.0 is a folder, 0.33.0 never one here
        check_tree(path)
        return _unambiguous(_tree(path.resolve(), tree_version(path), "working copy"))
    for name in (text, ALIASES.get(text, text), *(alias for alias, same in ALIASES.items() if same == text)):
        for tree in trees():
            if tree.version == name and tree.kind != "working copy":
                return _as_named(_unambiguous(tree), text)
    if not is_release(text):
        raise TierError("--vllm", f"{text!r} is no release and no folder", "give a release such as 0.27.0, a path, or installed")
    raise TierError("--vllm", f"no vLLM {text} here", f"get it with `kvcover vllm add {text}`")


def path_of(text: str, place: str) -> Path:
    """The path that a name may be. Raises InputError for one that can be none: a user who isn't there, no end of letters."""
    try:
        path = Path(text).expanduser()
        path.resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(place, f"{short(text)} is no release and no folder: {error}", "give a release such as 0.27.0") from None
    return path


def is_release(text: str) -> bool:
    """Whether a text is a release's name, known or not; a folder of that name is given as `./0.27.0`."""
    return _RELEASE.fullmatch(text) is not None


def check_tree(path: Path) -> None:
    """Raise TierError if a folder holds no vLLM with a MoRI-IO connector."""
    if not path.is_dir():
        raise TierError("--vllm", f"{str(path)!r} is no folder", "give the folder that holds vllm/")
    if not (path / "vllm").is_dir():
        raise TierError("--vllm", f"{str(path)!r} holds no vllm/", "give the top folder of a vLLM working copy")
    if not (path / MORIIO_FOLDER / "moriio_connector.py").is_file():
        raise TierError("--vllm", f"the vLLM in {str(path)!r} has no MoRI-IO connector", "use 0.24.0 or newer")


def _unambiguous(tree: Tree) -> Tree:
    """Raise TierError if a tree's folder of metadata and its own `vllm/_version.py` name two versions."""
    if tree.path is not None and tree.version and (inside := version_file(tree.path)) not in (None, tree.version):
        text = f"{str(tree.path)!r} is vLLM {tree.version} by its dist-info, and {inside} by its vllm/_version.py"
        raise TierError("--vllm", text, f"get the release anew with `kvcover vllm add {tree.version}`, or correct the tree")
    return tree


def _as_named(tree: Tree, name: str) -> Tree:
    """Raise TierError if a tree that goes by a release's name has not that release's connector."""
    if ALIASES.get(name, name) in RELEASES and not tree.identity.is_release(name):
        text = f"{str(tree.path)!r} calls itself vLLM {tree.version}, and by its connector's files it is {tree.identity.text}"
        raise TierError("--vllm", text, f"get the release anew with `kvcover vllm add {name}`, or give the tree by its path")
    return tree


def refuse_other_release(tree: Tree, release: str, place: str) -> None:
    """Raise TierError unless a vLLM has the connector of the release that was asked for, whatever it calls itself."""
    if tree.identity.is_release(release):
        return
    where = "installed" if tree.path is None else f"in {str(tree.path)!r}"
    name_it = f", name {tree.identity.release}" if tree.identity.exact else ""
    hint = f"run it where {release} is{name_it}, or give a vLLM by its folder (--vllm, --before, --after) and name no release"
    raise TierError(place, f"asked for vLLM {release}, but {tree.label} is {where}", hint)


def release_of(tree: Tree, asked: str) -> str:
    """The release by whose rules a vLLM that was given is run: that of its connector's files, where they are of one.

    A scenario that names no release asks for the newest. Raises InputError if it names one that the vLLM is not, unless it has
    no release's connector and nothing else says what it is.
    """
    known = tree.identity
    if asked == NEWEST or (known.release is None and tree.version is None):
        return known.release or asked
    if ALIASES.get(asked, asked) == known.release or (not known.exact and ALIASES.get(asked, asked) == number_of(tree.version)):
        return asked
    raise InputError("--vllm", f"{tree.label} is not the {asked} that the scenario asks for", "leave out one of the two")


def check_machine() -> None:
    """Raise TierError if the connector can't run on this machine at all."""
    if sys.platform != "linux":
        raise TierError("--tier connector", f"it runs on Linux, not on {sys.platform}", "use --tier model")
    if not Path("/proc/self/stat").exists():
        raise TierError("--tier connector", "/proc is not there, by which processes are found", "mount -t proc proc /proc")
    if missing := _missing(_RUN_NEEDS):
        raise TierError("--tier connector", f"needs {', '.join(missing)}", f"install with {_EXTRA}")


def installed() -> Tree:
    """The vLLM of this environment. Raises TierError if there is none, or one without the connector."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        hint = "use an image of vLLM, or --vllm 0.27.0 after `kvcover vllm add 0.27.0`"
        raise TierError("--vllm", "no vLLM is installed in this environment", hint)
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    check_tree(folder)
    try:
        version = importlib.metadata.version("vllm").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        version = None
    return Tree(None, version, "installed", tuple(connector_files(folder).items()))


def _missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


# -- adding and removing -------------------------------------------------------------------------------------------


def add_release(release: str, say: Callable[[str], None]) -> Tree:
    """Install the official source of a release, without kernels, into the cache. Raises InputError if that fails."""
    place = f"vllm add {release}"
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+|rc\d+)?", release):
        raise InputError(place, f"{release!r} is no release and no folder", "give a release such as 0.27.0, or a path")
    if missing := _missing(_BUILD_NEEDS):
        # Where torch is, as in an image for ROCm, the extra would bring another one.
        how = _EXTRA if "torch" in missing else f"pip install --no-deps {' '.join(missing)}"
        raise InputError(place, f"building needs {', '.join(missing)}", f"install with {how}")
    home = cache()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(place, f"can't make {str(home)!r}: {error.strerror}", "set KVCOVER_CACHE to a folder of yours") from None
    final, partial = home / release, home / f".partial-{release}"
    with locked(home / f".lock-{release}", place):
        if (final / MORIIO_FOLDER).is_dir():
            say(f"vLLM {release} is there already: {final}")
            return _tree(final, release, "cache")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()  # takes pip's temporary files too, and goes with all of them however this ends
            _pip(release, partial / "tree", place, say)
            _verify(partial / "tree", release, place)
            shutil.rmtree(final, ignore_errors=True)  # one without a connector: no tree
            (partial / "tree").replace(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return _tree(final, release, "cache")


def _verify(partial: Path, release: str, place: str) -> None:
    if not (partial / MORIIO_FOLDER / "moriio_connector.py").is_file():
        raise InputError(place, f"vLLM {release} has no MoRI-IO connector", "use 0.24.0 or newer")
    if (version := tree_version(partial)) != release:
        raise InputError(place, f"pip installed {version}, not {release}", "report it")


def _pip(release: str, target: Path, place: str, say: Callable[[str], None]) -> None:
    """Let pip build and install; what is worth telling goes to `say`, all of it into a log."""
    command = launch.python("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-binary", "vllm",
                            "--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--target", str(target),
                            f"vllm=={release}")  # fmt: skip
    own = launch.environment(VLLM_VERSION_OVERRIDE=release, VLLM_TARGET_DEVICE="empty", TMPDIR=str(target.parent))
    started = time.monotonic()

    def hear(line: str) -> None:
        if _TOLD.match(line):
            say(f"{time.monotonic() - started:4.0f} s  {line.strip()[:100]}")

    say(f"installing vLLM {release} without kernels (about 80 MB, half a minute)")
    code, lines = run_logged(command, own, target.parent, hear)
    if code:
        raise pip_error(lines, place, f"source of vLLM {release}", "see `kvcover releases`", f"connect, or check {_EXTRA}")


def add_working_copy(path: Path) -> Tree:
    """Remember a working copy of vLLM, which is used as it is."""
    check_tree(path)
    path = path.resolve()
    _write_working_copies([*[known for known in _working_copies() if known != path], path])
    return _tree(path, tree_version(path), "working copy")


def remove(text: str) -> Tree:
    """Delete a release from the cache, or forget a working copy. Nothing outside the cache is ever deleted."""
    path = path_of(text, "vllm remove")
    copies = _working_copies()
    if path.resolve() in copies:
        _write_working_copies([known for known in copies if known != path.resolve()])
        return Tree(path.resolve(), None, "working copy")
    for tree in trees():
        if tree.kind == "cache" and tree.version == text and tree.path is not None:
            doomed = tree.path.with_name(f".removed-{text}-{os.getpid()}")
            tree.path.replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            return tree
    raise InputError("vllm remove", f"no vLLM {text!r} of kvcover's own", "see `kvcover vllm list`")


def _working_copies() -> list[Path]:
    try:
        return [Path(path) for path in json.loads((cache() / "working-copies.json").read_text())]
    except (OSError, ValueError, TypeError):
        return []


def _write_working_copies(paths: list[Path]) -> None:
    file = cache() / "working-copies.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps([str(path) for path in paths]))
        scratch.replace(file)
    except OSError as error:
        raise InputError("vllm", f"can't write {str(file)!r}: {error.strerror}", "set KVCOVER_CACHE") from None


def folder_mb(path: Path) -> int:
    """Size of a tree in MB."""
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return round(total / 1e6)
