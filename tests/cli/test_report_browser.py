"""The report's page in a real browser, opened from a file: cells open by mouse and by keys, and nothing goes wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcover.sim.report.gather import gather
from kvcover.sim.report.page import page
from tests.unit.test_report import everything, grid, hostile, written

pytestmark = pytest.mark.slow
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="NOT RUN: needs playwright (extra `browser`)")
    path = os.environ.get("KVCOVER_BROWSER") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("NOT RUN: needs a browser, such as Debian's package chromium, or its path in KVCOVER_BROWSER")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page from a file, and all that its console and its network had to say."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**options)
        self.view = self.context.new_page()
        self.view.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.view.on("pageerror", lambda error: self.said.append(str(error)))
        self.view.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.view.on("request", lambda request: self.asked.append(request.url))
        self.view.goto(path.as_uri())
        assert self.asked == [path.as_uri()]

    def run_of(self, cell: str) -> Any:
        return self.view.locator(f"details:has(#{cell.replace('cell', 'run')})")

    def close(self) -> None:
        assert self.said == []
        self.context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    places = [written(folder, f"{name}.json", list(grid(name))) for name in ("0.26.0", "0.27.0")]
    path = folder / "report.html"
    path.write_text(page(gather(places)), encoding="utf-8")
    return path


def test_a_cell_opens_and_closes_by_mouse(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    run = opened.run_of("cell-4")
    assert not run.is_visible()
    opened.view.click("#cell-4")
    assert run.is_visible() and "P1 dialled port" in run.inner_text()
    assert "kvcover run --prefill tp=2 --decode tp=2 --release 0.26.0" in run.inner_text()
    assert opened.view.get_attribute("#cell-4", "aria-expanded") == "true"
    opened.view.click("#cell-4")
    assert not run.is_visible()
    opened.close()


def test_a_cell_opens_and_closes_by_keys(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    press = opened.view.keyboard.press

    def focused() -> str:
        return str(opened.view.evaluate("document.activeElement.id"))

    for _ in range(20):
        press("Tab")
        if focused().startswith("cell-"):
            break
    assert focused() == "cell-1"
    for key, cell in (("ArrowRight", "cell-2"), ("ArrowDown", "cell-4"), ("ArrowDown", "cell-4"), ("ArrowLeft", "cell-3")):
        press(key)
        assert focused() == cell
    for key in ("Enter", " "):
        press(key)
        assert opened.run_of("cell-3").is_visible()
        assert opened.view.evaluate("document.activeElement.tagName") == "SUMMARY"
        press("Escape")
        assert not opened.run_of("cell-3").is_visible()
        assert focused() == "cell-3"
    opened.close()


def test_an_address_opens_its_run(browser: Any, report: Path) -> None:
    opened = Opened(browser, report)
    opened.view.goto(f"{report.as_uri()}#run-5")
    opened.view.reload()
    assert opened.run_of("cell-5").is_visible()
    opened.close()


def test_without_a_script_runs_are_listed_and_links_lead_to_them(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, java_script_enabled=False)
    assert opened.run_of("cell-4").is_visible()
    assert not opened.view.locator("#run-4").is_visible()
    opened.view.click("#cell-4")
    assert opened.view.locator("#run-4").is_visible()
    opened.close()


def luminance(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_can_be_read_in_the_light_in_the_dark_and_on_narrow_screens(browser: Any, report: Path, scheme: str, width: int) -> None:
    opened = Opened(browser, report, color_scheme=scheme, viewport={"width": width, "height": 800})
    assert opened.view.evaluate("document.documentElement.scrollWidth") <= width
    read = """() => [...document.querySelectorAll('.legend li, .heat td:not(.none), body')].map(
        (each) => { const style = getComputedStyle(each); return [style.color, style.backgroundColor]; })"""
    pairs = [sorted(map(luminance, pair)) for pair in opened.view.evaluate(read)]
    assert len(pairs) > 16
    assert min((light + 0.05) / (dark + 0.05) for dark, light in pairs) >= 4.5  # WCAG 2, level AA
    opened.close()


def test_paper_shows_maps_and_opened_runs_in_ink_on_white(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, color_scheme="dark")
    opened.view.click("#cell-4")
    opened.view.emulate_media(media="print")
    assert opened.view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.run_of("cell-4").is_visible() and not opened.run_of("cell-3").is_visible()
    assert not opened.view.locator("nav").is_visible()
    opened.close()


def test_text_of_files_does_nothing(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page(gather(everything(tmp_path, hostile))), encoding="utf-8")
    opened = Opened(browser, path)
    opened.view.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert opened.view.evaluate("document.images.length + document.scripts.length") == 1
    opened.close()
