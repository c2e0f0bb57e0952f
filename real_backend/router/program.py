"""Real routers as programs: how each is started on loopback, and the environment that it runs in.

An environment is a virtual one in the user's cache, made by pip when it is first asked for; nothing is installed elsewhere.
"""

from __future__ import annotations

import ast
import fcntl
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER, user_cache
from kvcover.sim import launch
from kvcover.sim.errors import InputError, TierError, short
from kvcover.sim.releases.records import ALIASES, RELEASES

Say = Callable[[str], None]
_PLACES = ("{port}", "{discovery}")
_PROXY_FILE = "moriio_toy_proxy_server.py"
_PROXY_NEEDS = ("quart", "aiohttp", "msgpack", "pyzmq")
_COMMON = f"{MORIIO_FOLDER}/moriio_common.py"
_NO_NETWORK = ("name resolution", "Connection", "Network is unreachable", "ProxyError", "timed out", "Max retries")
_INSTALL_LIMIT_S = 300.0


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A router as it is started. In `command` `{port}` stands for its HTTP port, `{discovery}` for that of registrations,
    `{metrics}` for one more that is free, `{folder}` for the run's own folder, into which `files` are written before.
    """

    name: str
    command: tuple[str, ...]
    files: dict[str, str] = {}
    python_path: str = ""

    def started(self, ports: tuple[int, int, int], folder: Path) -> list[str]:
        """The command with everything filled in."""
        stand_for = dict(zip((*_PLACES, "{metrics}"), map(str, ports), strict=True)) | {"{folder}": str(folder)}
        return [_filled(word, stand_for) for word in self.command]


def _filled(word: str, stand_for: dict[str, str]) -> str:
    for name, value in stand_for.items():
        word = word.replace(name, value)
    return word


def program_of(text: str, vllm: str | None, more: Sequence[str], say: Say) -> Program:
    """The router of that name, installed if need be. Raises InputError for a name that is none, TierError if it can't be installed.

    `vllm`: the working copy whose own toy proxy it is. `more`: options that the router is started with besides.
    """
    name, _, version = text.partition(" ")
    if name == "toy-proxy":
        if more:
            raise InputError("--options", "the toy proxy takes none", "leave them out")
        if (vllm is None) == (not version):
            raise InputError("ROUTER", f"{short(text)}: which vLLM's proxy?", "write 'toy-proxy 0.27.0', or toy-proxy --vllm PATH")
        return _toy_proxy(version or f"of {vllm}", *(_of_tree(vllm) if vllm else _of_release(version, say)), say)
    if name != "vllm-router" or vllm is not None:
        problem = f"{short(text)} is no router that can be started" if vllm is None else "--vllm is for the toy proxy"
        raise InputError("ROUTER", problem, "write 'vllm-router 0.1.17', 'toy-proxy 0.33.0', or --command with your own")
    return _vllm_router(version, more, say)


def own_command(text: str) -> Program:
    """A router that a user starts by a command of his. Raises InputError if it doesn't say where the ports go."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InputError("--command", f"can't read {short(text)}: {error}", "close the quotes") from None
    if missing := [place for place in _PLACES if place not in text]:
        problem = f"{short(text)} has no {' and no '.join(missing)}"
        raise InputError("--command", problem, "such as './router --port {port} --discovery 127.0.0.1:{discovery}'")
    if shutil.which(words[0]) is None:
        raise InputError("--command", f"there is no program {short(words[0])}", "give its path")
    return Program(name=Path(words[0]).name, command=(str(Path(shutil.which(words[0]) or words[0]).absolute()), *words[1:]))


# -- vllm-router -------------------------------------------------------------------------------------------------


def _vllm_router(version: str, more: Sequence[str], say: Say) -> Program:
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise InputError("ROUTER", f"{short(version)} is no version of vllm-router", "write 'vllm-router 0.1.17'")
    python = _environment(f"vllm-router-{version}", [f"vllm-router=={version}"], say)
    connector = ("--kv-connector", "moriio") if [int(part) for part in version.split(".")] >= [0, 1, 15] else ()
    own = ("--host", "127.0.0.1", "--port", "{port}", "--vllm-discovery-address", "127.0.0.1:{discovery}")
    metrics = ("--prometheus-host", "127.0.0.1", "--prometheus-port", "{metrics}")
    script = str(python.with_name("vllm-router"))  # its first line names a path that may be too long for the system, or old
    command = (str(python), "-P", script, "--vllm-pd-disaggregation", *connector, *own, *metrics, *more)
    return Program(name=f"vllm-router {version}", command=command)


# -- the toy proxy of a vLLM -------------------------------------------------------------------------------------


def _toy_proxy(version: str, proxy: str, constants: str, say: Say) -> Program:
    """The proxy, and in place of the vLLM that it imports its `MoRIIOConstants`, cut out of the same source."""
    python = _environment("toy-proxy", _PROXY_NEEDS, say)
    packages = [Path(MORIIO_FOLDER), *Path(MORIIO_FOLDER).parents][:-1]
    files = {f"stand_in/{package}/__init__.py": "" for package in packages}
    files |= {_PROXY_FILE: proxy, f"stand_in/{_COMMON}": constants}
    main = str(Path(__file__).with_name("toy_proxy_main.py"))
    command = (str(python), "-P", main, f"{{folder}}/{_PROXY_FILE}", *_PLACES)
    return Program(name=f"toy-proxy {version}".strip(), command=command, files=files, python_path="{folder}/stand_in")


def _of_tree(vllm: str) -> tuple[str, str]:
    """The proxy and the constants of a working copy."""
    place = Path(vllm).expanduser()
    found = sorted((place / "examples").rglob(_PROXY_FILE)) if (place / "examples").is_dir() else []
    if not found:
        raise TierError("--vllm", f"{vllm!r} has no examples/…/{_PROXY_FILE}", "give the top folder of a working copy of vLLM")
    try:
        return found[0].read_text(), _constants((place / _COMMON).read_text(), vllm)
    except (OSError, UnicodeDecodeError) as error:
        raise TierError("--vllm", f"can't read {vllm!r}: {error}", "give the top folder of a working copy of vLLM") from None


def _constants(source: str, place: str) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise TierError("--vllm", f"{place}/{_COMMON} is no Python: {error}", "") from None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "MoRIIOConstants":
            return ast.unparse(node) + "\n"
    raise TierError("--vllm", f"{place}/{_COMMON} has no MoRIIOConstants", "use vLLM 0.24.0 or newer")


def _of_release(release: str, say: Say) -> tuple[str, str]:
    """The same out of a release's source archive, kept in the cache."""
    release = ALIASES.get(release, release)
    if release not in RELEASES or release == "reference":
        raise InputError("ROUTER", f"no release {short(release)}", "see `kvcover releases`, or give a working copy with --vllm")
    home = _home() / "toy-proxy-sources" / release
    with _locked(home):
        if not (home / "constants.py").is_file():
            _fetch_source(release, home, say)
        return (home / _PROXY_FILE).read_text(), (home / "constants.py").read_text()


def _fetch_source(release: str, home: Path, say: Say) -> None:
    say(f"fetching the source archive of vLLM {release} (some 40 MB) for its toy proxy")
    with tempfile.TemporaryDirectory(prefix="kvcover-") as folder:
        # pip asks a source archive for its metadata, which vLLM's set-up works out with torch.
        words = ("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "-d", folder, f"vllm=={release}")
        own = launch.environment(VLLM_VERSION_OVERRIDE=release, VLLM_TARGET_DEVICE="empty", TMPDIR=folder)
        _pip(Path(sys.executable), words, f"toy-proxy {release}", own, Path(folder))
        texts: dict[str, str] = {}
        for archive in Path(folder).glob("vllm-*.tar.gz"):
            with tarfile.open(archive) as tar:
                for member in tar:
                    inner = member.name.partition("/")[2]
                    is_proxy = inner.startswith("examples/") and inner.endswith(_PROXY_FILE)
                    if (is_proxy or inner == _COMMON) and (file := tar.extractfile(member)):
                        texts[_PROXY_FILE if is_proxy else _COMMON] = file.read().decode()
    if len(texts) < 2:
        raise TierError("ROUTER", f"the source of vLLM {release} has no {_PROXY_FILE}", "use 0.24.0 or newer")
    (home / _PROXY_FILE).write_text(texts[_PROXY_FILE])
    (home / "constants.py").write_text(_constants(texts[_COMMON], f"vLLM {release}"))  # last: with it the source is complete


# -- environments ------------------------------------------------------------------------------------------------


def _home() -> Path:
    return user_cache() / "routers"


def _environment(name: str, needs: Sequence[str], say: Say) -> Path:
    """The Python of a virtual environment with what is needed."""
    home = _home() / name
    with _locked(home):
        python = home / "env" / "bin" / "python"
        if not (home / "complete").is_file():
            say(f"installing {', '.join(needs)} into an environment of its own: {home}")
            with tempfile.TemporaryDirectory(prefix="kvcover-") as folder:
                own = launch.environment(TMPDIR=folder, PYTHONPATH="")
                made = launch.python("-m", "venv", "--clear", str(home / "env"))
                _run(made, f"environment of {name}", own, Path(folder))
                _pip(python, ("install", *needs), name, own, Path(folder))
            (home / "complete").write_text(" ".join(needs) + "\n")
    return python


def _pip(python: Path, words: Sequence[str], place: str, own: dict[str, str], folder: Path) -> None:
    quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    _run([str(python), "-P", "-m", "pip", words[0], *quiet, *words[1:]], place, own, folder)


def _run(command: list[str], place: str, own: dict[str, str], folder: Path) -> None:
    """Run it to its end; raises TierError with what went wrong."""
    with launch.Launched(command, env=own, folder=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        try:
            text, _ = run.output(_INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TierError(place, f"pip was not done in {_INSTALL_LIMIT_S:g} s", "try it again") from None
    if not run.process.returncode:
        return
    if "No matching distribution" in text and not any(sign in text for sign in _NO_NETWORK):
        raise TierError(place, "the package index has none for this machine", "name another version")
    if any(sign in text for sign in _NO_NETWORK):
        raise TierError(place, "the package index can't be reached", "connect, or give --command with a router that is here")
    told = [line for line in text.splitlines() if "rror" in line] or text.splitlines() or [f"exit code {run.process.returncode}"]
    needs = "; vLLM's source needs torch: pip install 'kvcover[connector]', or give --vllm PATH" if "torch" in text else ""
    raise TierError(place, f"can't be installed: {told[-1].strip()[:200]}{needs}", "")


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One at a time makes what is in a folder."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / ".lock").open("w")
    except OSError as error:
        raise TierError("KVCOVER_CACHE", f"can't write {str(home)!r}: {error.strerror}", "set it to a folder of yours") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
