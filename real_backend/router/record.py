"""Runs a router between stub engines on loopback, asks it, and notes both legs of every request.

A router that dies, never listens, never takes the engines' registrations, or never answers is told of in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from kvcover.real_backend.driver.trial import ROLES, Role
from kvcover.real_backend.router.heartbeat import announce
from kvcover.real_backend.router.messages import post
from kvcover.real_backend.router.program import Program
from kvcover.real_backend.router.stub_engine import SeenLeg, StubEngine
from kvcover.sim import launch
from kvcover.sim.errors import Inconclusive, TierError
from kvcover.sim.releases.records import NEWEST, get_release

_LATE_LEG_S = 1.0
"""A leg that is tried again may come when the client has its answer."""
_STRANGERS = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
"""Loopback is nobody's to forward."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What registers with a router: (TP, DP) of each side, `instances` of each role, in one mode.

    `release` is that whose answers the prefill stub gives; `odd`: with sizes and ids that are not its own.
    """

    mode: str
    prefill: tuple[int, int]
    decode: tuple[int, int]
    instances: int = 1
    release: str = NEWEST
    odd: bool = False

    def size(self, role: Role) -> tuple[int, int]:
        """TP and DP of a role."""
        return self.prefill if role == "prefill" else self.decode


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a client."""

    chat: bool = False
    stream: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, number: int) -> dict[str, object]:
        """The whole request; no two have a prefix in common, by which some routers choose."""
        prompt = " ".join(f"{number}-{word}" for word in range(40))
        said = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return {"model": "stub", "max_tokens": 16, "temperature": 0.0, "stream": self.stream} | said


PLAIN = Ask()
EVERY_WAY = (PLAIN, Ask(stream=True), Ask(chat=True), Ask(chat=True, stream=True))


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """Both legs of one request; `more`: legs beyond these two, as of a request that was tried again."""

    shape: Shape
    ask: Ask
    prefill: SeenLeg
    decode: SeenLeg
    more: int = 0

    def leg(self, role: Role) -> SeenLeg:
        """The leg of a role."""
        return self.prefill if role == "prefill" else self.decode


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A request of which one leg was answered 503: the client's status, 0 if it got none, and all legs in order."""

    status: int
    legs: list[SeenLeg]


def record(program: Program, shape: Shape, asks: Sequence[Ask], limit_s: float, start_s: float | None = None) -> list[Exchange]:
    """One freshly started router, asked in turn. `limit_s`: for each answer, and for its start unless `start_s` is given.

    Raises TierError for a router that ends by itself, Inconclusive for one that does not do its work in time. However this
    ends, the router and all that came of it are gone.
    """
    return _in_folder(program, lambda folder: _Session(program, shape, folder, limit_s, start_s or limit_s).play(asks))


def fail_a_leg(program: Program, shape: Shape, role: Role, limit_s: float) -> Trouble:
    """A healthy request, then one whose first leg of a role is answered 503: what the router makes of it. Raises as `record`."""
    return _in_folder(program, lambda folder: _Session(program, shape, folder, limit_s, limit_s).trouble(role))


def forgets_after(program: Program, shape: Shape, role: Role, limit_s: float) -> float | None:
    """Seconds from the last heartbeat of the one instance of a role until its requests are refused; None if not in the limit."""
    return _in_folder(program, lambda folder: _Session(program, shape, folder, limit_s, limit_s).silence(role))


_T = TypeVar("_T")
_TRIES = 3
_PORTS = range(30_001, 32_700)  # above those of the connector tier's runs


class _PortTaken(TierError):
    """Somebody else took a port between our look and the router's start: it is tried with others."""


def _in_folder(program: Program, play: Callable[[Path], Coroutine[Any, Any, _T]]) -> _T:
    with launch.work_folder() as folder:
        for name, text in program.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        for tries_left in reversed(range(_TRIES)):
            with contextlib.suppress(_PortTaken) if tries_left else contextlib.nullcontext():
                return asyncio.run(play(folder))
        raise AssertionError("the last try returns or raises")


class _Session:
    """One router with its engines."""

    def __init__(self, program: Program, shape: Shape, folder: Path, limit_s: float, start_s: float) -> None:
        self._program, self._shape, self._folder, self._limit_s, self._start_s = program, shape, folder, limit_s, start_s
        self._seen: list[SeenLeg] = []
        self._changed = asyncio.Event()
        self._failing: Role | None = None
        release = get_release(shape.release)
        self._engines = [
            StubEngine(role, instance, shape.size(role), shape.mode, release, self._note, shape.odd)
            for instance in range(shape.instances)
            for role in ROLES
        ]

    def _note(self, leg: SeenLeg) -> bool:
        """Note a leg, and say whether it is the one that fails."""
        self._seen.append(leg)
        self._changed.set()
        fails, self._failing = leg.role == self._failing, None if leg.role == self._failing else self._failing
        return fails

    async def play(self, asks: Sequence[Ask]) -> list[Exchange]:
        """Start all, ask, and end all."""
        async with self._running():
            return [await self._exchange(number, ask) for number, ask in enumerate(asks)]

    async def trouble(self, role: Role) -> Trouble:
        """The same with a leg that fails."""
        async with self._running():
            await self._exchange(0, PLAIN)
            self._seen.clear()
            self._failing = role
            status, _ = await self._asked(PLAIN, 1)
            await asyncio.sleep(_LATE_LEG_S)
            return Trouble(status=status, legs=list(self._seen))

    async def silence(self, role: Role) -> float | None:
        """The same with heartbeats that stop."""
        async with self._running():
            await self._exchange(0, PLAIN)
            self._beats[role].cancel()
            stopped = time.monotonic()
            while (silent_s := time.monotonic() - stopped) < self._limit_s:
                if (await self._asked(PLAIN, 1))[0] != 200:
                    return silent_s
                await asyncio.sleep(0.25)
            return None

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Engines that answer, and a router that listens."""
        async with self._running_engines():
            self._port, discovery, metrics = free_ports(3)
            command = self._program.started((self._port, discovery, metrics), self._folder)
            with self._log.open("wb") as log, self._launched(command, log) as router:
                self._router = router
                beats = [asyncio.create_task(announce(discovery, engine.registration)) for engine in self._engines]
                self._beats = {engine.role: beat for engine, beat in zip(self._engines, beats, strict=True)}
                try:
                    await self._listening()
                    yield
                finally:
                    for beat in beats:
                        beat.cancel()
                    await asyncio.gather(*beats, return_exceptions=True)

    @property
    def _log(self) -> Path:
        return self._folder / "router.log"

    def _launched(self, command: list[str], log: IO[bytes]) -> launch.Launched:
        python_path = self._program.python_path.replace("{folder}", str(self._folder))
        own = launch.environment(PYTHONPATH=python_path, PYTHONUNBUFFERED="1", NO_PROXY="127.0.0.1,localhost")
        own = {name: value for name, value in own.items() if name not in _STRANGERS}
        return launch.Launched(command, env=own, cwd=self._folder, folder=self._folder, stdout=log, stderr=log)

    @contextlib.asynccontextmanager
    async def _running_engines(self) -> AsyncIterator[None]:
        try:
            for engine in self._engines:
                await engine.start()
            yield
        finally:
            for engine in self._engines:
                engine.stop()

    async def _listening(self) -> None:
        """Wait until the router takes connections."""
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            self._check_alive()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise Inconclusive(f"{self._program.name} did not listen on its port in {self._start_s:g} s{self._last_words()}")

    async def _exchange(self, number: int, ask: Ask) -> Exchange:
        """Ask once; the first request is asked again until the router knows its engines."""
        deadline, said = time.monotonic() + self._limit_s, ""
        while True:
            self._seen.clear()
            status, said = await self._asked(ask, number)
            if status == 200:
                break
            if number or time.monotonic() > deadline:
                why = "" if number else f" for {self._limit_s:g} s"
                short = " ".join(said.split())[:160]
                raise Inconclusive(f"{self._program.name} answered {status}{why}: {short or 'nothing'}{self._last_words()}")
            await asyncio.sleep(0.25)
        while missing := [role for role in ROLES if not self._of(role)]:
            self._check_alive()
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                text = f"{self._program.name} answered, and no leg came to {' and '.join(missing)} in {self._limit_s:g} s"
                raise Inconclusive(text) from None
        first = {role: self._of(role)[0] for role in ROLES}
        return Exchange(shape=self._shape, ask=ask, more=len(self._seen) - 2, **first)

    def _of(self, role: Role) -> list[SeenLeg]:
        return [leg for leg in self._seen if leg.role == role]

    async def _asked(self, ask: Ask, number: int) -> tuple[int, str]:
        asking = asyncio.create_task(post(self._port, ask.path, ask.body(number), self._limit_s))
        while not asking.done():
            await asyncio.wait([asking], timeout=0.1)
            if self._router.process.poll() is not None:
                await asyncio.wait([asking], timeout=0.2)
                break
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        self._check_alive()
        try:
            return asking.result()
        except TimeoutError:
            text = f"{self._program.name} took a request and did not answer in {self._limit_s:g} s{self._last_words()}"
            raise Inconclusive(text) from None
        except OSError as error:
            return 0, str(error)

    def _check_alive(self) -> None:
        """Raise TierError if the router is no more."""
        code = self._router.process.poll()
        if code is not None:
            text = f"it ended with exit code {code}{self._last_words()}"
            raise (_PortTaken if "already in use" in text.lower() else TierError)(self._program.name, text)

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()] if self._log.exists() else []
        return f"; it said {lines[-1].strip()[:200]!r}" if lines else ""


def free_ports(count: int) -> list[int]:
    """Ports of loopback on which nobody listens now, below those that a system gives to whoever asks for any."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise TierError("ports", f"no {count} are free from {_PORTS.start} to {_PORTS.stop - 1}", "end what listens there")
