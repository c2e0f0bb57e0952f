"""`kvcover report`: what files hold stands on the page and in the Markdown, as text that can't be taken for markup."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import InputError, Result, Scenario, build, matrix, run
from kvcover.sim.report.content import shade
from kvcover.sim.report.gather import Material, gather
from kvcover.sim.report.markdown import markdown
from kvcover.sim.report.page import page
from kvcover.sim.report.picture import picture
from kvcover.sim.report.views import heats_of, layers_of, releases_beside, routers_of
from kvcover.sim.results.show import fraction

SMALL = {"model": "layers=2,mla=64+16", "prompt_tokens": 32}


def grid(release: str, **fields: Any) -> list[Result]:
    return matrix(build(SMALL | {"release": release} | fields), prefill=[1, 2], decode=[1, 2])


def written(folder: Path, name: str, rows: list[Any]) -> str:
    path = folder / name
    path.write_bytes(msgspec.json.encode(rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("results")
    grids = {release: grid(release) for release in ("0.26.0", "0.27.0")}
    grids["faulty"] = grid("0.27.0", faults=["drop-notice:write_done"])
    return {name: written(folder, f"{name}.json", list(rows)) for name, rows in grids.items()}


class Page(HTMLParser):
    """Tags, the cells of maps by their labels, and the runs that the cells open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.cells: dict[tuple[str, str], str] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[tuple[str, str]] = []
        self._run = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        had = dict(attrs)
        self.tags[tag] += 1
        self.attributes |= set(had)
        if "id" in had:
            self.ids.append(had["id"] or "")
            self._run = had["id"] or "" if (had["id"] or "").startswith("run-") else self._run
        if tag == "a":
            self.links.append(had.get("href") or "")
        if had.get("class") == "cell":
            self._open.append((had["aria-label"] or "", had["href"] or ""))
            self.cells[self._open[-1]] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self._run, []).append(data)
        if self._open:
            self.cells[self._open[-1]] += f" {data}"


def test_every_cell_says_coverage_and_outcome_in_words_and_opens_its_run(files: dict[str, str]) -> None:
    material = gather([files["0.26.0"], files["0.27.0"]])
    shown = Page(page(material))
    cells = [(href, text.split()) for (label, href), text in shown.cells.items() if label.startswith("prefill")]
    assert len(cells) == len(material.runs) == 16
    told = {f"#run-{each.number}": each.result for each in material.runs}
    for href, words in cells:
        result = told[href]
        assert words[0] == fraction(result.coverage) and result.outcome in words[2]
        details = " ".join(" ".join(shown.words[href[1:]]).split())
        assert result.replay in details
        for finding in result.findings:
            assert finding.text in details and all(cause in details for cause in finding.causes)
        assert all(f"D{rank.tp} {fraction(rank.coverage)}" in details for rank in result.by_rank)


def test_every_address_is_on_the_page_and_nothing_is_fetched(files: dict[str, str]) -> None:
    text = page(gather(list(files.values())), gather([files["0.26.0"]]).runs)
    shown = Page(text)
    assert len(set(shown.ids)) == len(shown.ids)
    assert {link[1:] for link in shown.links} <= set(shown.ids) and all(link.startswith("#") for link in shown.links)
    assert not shown.attributes & {"src", "srcset", "action", "style", "onclick", "data", "poster"}
    assert "http" not in text.replace("http-equiv", "") and "@import" not in text and "url(" not in text


def test_release_against_release_shows_what_differs_only(files: dict[str, str]) -> None:
    tables = releases_beside(heats_of(gather([files["0.26.0"], files["0.27.0"]]).runs))
    write = next(table for table in tables if table.setting.mode == "write")
    assert write.columns == ["0.26.0", "0.27.0"]
    # rows 0.26.0 and 0.27.0/write/p2d2/mla/toy of the measured table: the fix changes that pairing, and none with a TP of 1
    assert [pair for pair, _ in write.rows] == [(2, 2)] and write.alike == 3


def test_faults_are_shown_beside_the_runs_without_them(files: dict[str, str]) -> None:
    text = " ".join(" ".join(page(gather([files["0.27.0"], files["faulty"]])).split()).split())
    assert "drop-notice:write_done" in text
    assert "4 of 4" in text and "0 of 4: proves nothing" in text  # READ has no such notice


def test_a_baseline_of_two_releases_is_refused_where_it_is_unclear(files: dict[str, str]) -> None:
    both = gather([files["0.26.0"], files["0.27.0"]]).runs
    page(gather([files["0.27.0"]]), both)
    other = [msgspec.structs.replace(each, result=msgspec.structs.replace(each.result, release="0.33.0")) for each in both[:8]]
    with pytest.raises(InputError, match=r"--baseline: holds 2 runs like write P1→D1, on 0\.26\.0 and 0\.27\.0"):
        page(Material(places=[], runs=other, routers=[], explored=[], confirmed=[]), both)


def test_a_baseline_says_what_is_worse(files: dict[str, str]) -> None:
    text = markdown(gather([files["0.26.0"]]), gather([files["0.27.0"]]).runs)
    assert "| worse | WRITE P TP2 → D TP2, vLLM 0.26.0 | 1.0 ✓ ok | 0.5 ✕ corrupt | outcome ok → corrupt;" in text
    again = markdown(gather([files["0.26.0"]]), gather([files["0.26.0"]]).runs)
    assert "**Differences from the baseline**: 8 same\n" in again and "worse" not in again


def test_markdown_tables_are_whole(files: dict[str, str]) -> None:
    text = markdown(gather(list(files.values())), gather([files["0.26.0"]]).runs)
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) >= 8
    for lines in blocks:
        widths = [len(line.replace("\\|", "").split("|")) for line in lines]
        assert set(widths) == {widths[0]} and set(lines[1]) == {"|", "-"}, lines


def test_maps_of_two_routers_are_a_table_of_routers(tmp_path: Path) -> None:
    """What tests/unit/test_compat.py has from the notes: 0.1.15 sends no size that 0.33.0 reads (K3), later routers do."""
    rows = [*grid("0.33.0", router="vllm-router 0.1.15"), *grid("0.33.0", router="vllm-router 0.1.17")]
    found = routers_of(gather([written(tmp_path, "r.json", rows)]), heats_of(gather([str(tmp_path / "r.json")]).runs))
    works = {(cell.router, cell.mode): cell.works for cell in found}
    assert works["vllm-router 0.1.17", "write"] == "all" and works["vllm-router 0.1.15", "write"] == "P1→D1 only"


# -- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_batch_that_failed_is_one_layer_of_one_rank(mode: str) -> None:
    faults = [f"fail-transfer:{mode},layer=2,from=P1"]
    fields = {"release": "0.33.0", "mode": mode, "model": "layers=4,kv_heads=4,head_dim=8", "faults": faults}
    result = run(build(fields | {"prefill": {"tp": 4}, "decode": {"tp": 4}}))
    whole = [1.0] * 4
    assert [rank.by_layer for rank in result.by_rank] == [whole, [1.0, 1.0, 0.0, 1.0], whole, whole]
    assert layers_of(result) == [("0–1", whole), ("2", [1.0, 0.0, 1.0, 1.0]), ("3", whole)]


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "read"},
        {"prefill": {"tp": 2}},
        {"model": "gpt-oss-120b", "requests": 3, "mode": "read", "release": "0.32.0", "prefill": {"tp": 2}},
        {"release": "0.24.0"},
    ],
)
def test_layers_add_up_to_the_rank(fields: dict[str, Any]) -> None:
    """A model whose layers all need as many cells: then a rank's coverage is the mean of its layers'."""
    for rank in run(build({"decode": {"tp": 2}, "model": "layers=3,kv_heads=4,head_dim=8", "prompt_tokens": 64} | fields)).by_rank:
        layers = [each for each in rank.by_layer or [] if each is not None]
        assert layers and rank.coverage == pytest.approx(sum(layers) / len(layers))


def test_what_a_tier_does_not_tell_is_said() -> None:
    result = run(build(SMALL))
    real = msgspec.structs.replace(
        result, tier="connector", by_rank=[msgspec.structs.replace(r, by_layer=None) for r in result.by_rank]
    )
    assert layers_of(real) == []


@pytest.mark.parametrize(
    ("coverage", "colour"), [(0.0, "c0"), (1e-9, "c1"), (0.5, "c5"), (0.999999, "c9"), (1.0, "full"), (None, "none")]
)
def test_full_and_nothing_are_exactly_that(coverage: float | None, colour: str) -> None:
    assert shade(coverage) == colour


# -- text of others ----------------------------------------------------------------------------------------------

HOSTILE = "\"'><img src=x onerror=pwned()><script>pwned()</script></script></style><!--{{7*7}}{% x %}`|](javascript:pwned())@all\u202e\x1b[31m"
CHOSEN = {"outcome", "verdict", "shown", "effect", "schema", "by_request", "kind"}


def hostile(value: Any, name: str = "") -> Any:
    """The same with every text that a file is free to choose made hostile, names of fields of free tables too."""
    if isinstance(value, dict):
        free = name in ("overrides", "other")
        return {(key + HOSTILE if free else key): hostile(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each, name) for each in value]
    return value + HOSTILE if isinstance(value, str) and name not in CHOSEN else value


def everything(folder: Path, change: Any) -> list[str]:
    """Files of every kind that a report takes, after `change`."""
    bad = run(
        build(SMALL | {"release": "0.26.0", "prefill": {"tp": 2}, "decode": {"tp": 2}, "faults": ["drop:remote_tp_size"]})
    ).to_dict()
    bad["backend"] = {
        "mori": "loopback",
        "date": "x",
        "tracebacks": [{"rank": "P0", "error": "E", "text": "t", "place": "p", "effect": "caught and logged"}],
    }
    bad["findings"][0]["shown"] = ["heals"] * len(bad["findings"][0]["causes"])
    remedy = {"effect": "heals", "flips": ["x"], "outcome": "ok", "coverage": 1.0, "full_size": True, "command": "kvcover run"}
    bad["remedies"] = {"tried": 1, "pairs": 0, "layers": 2, "of_layers": 2, "seconds": 0.1, "found": [remedy]}
    bad["scenario"] |= {"overrides": {"peer_tp": "x"}, "other": {"name": "value"}}
    cells = [change(each.to_dict()) for each in grid("0.27.0")]
    pairing = {"prefill": 1, "decode": 1, "outcome": "hang", "coverage": 0.5, "race": True, "command": "kvcover run"}
    router = {
        "router": "r",
        "release": "0.27.0",
        "mode": "write",
        "works": "none",
        "worst": "hang",
        "race": True,
        "pairings": [pairing],
    }
    group = {
        "outcome": "hang",
        "release": "0.27.0",
        "mode": "write",
        "kinds": ["k"],
        "shape": ["s"],
        "count": 1,
        "name": "n",
        "replay": "kvcover run",
    }
    explored = {"runs": 1, "failures": 1, "outcomes": {"hang": 1}, "groups": [group], "passed": 0, "ended": "budget", "digest": "d"}
    sides = {"before": {"result": change(bad)}, "after": {"result": cells[0]}}
    confirmed = {"kind": "confirmation", "verdict": change("PREDICTED"), "reason": change("r"), **sides}
    corpus = change(bad | {"corpus": {"report": "vllm#1", "variant": "v", "as_expected": False}})
    router, explored = change(router), change(explored)
    lists = {
        "run": [change(bad)],
        "matrix": cells,
        "compat": [router],
        "explore": [explored],
        "confirm": [confirmed],
        "corpus": [corpus],
    }
    return [written(folder, f"{name}.json", rows) for name, rows in lists.items()]


def test_text_of_files_is_never_markup(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "hostile").mkdir()
    plain, odd = (everything(tmp_path / name, change) for name, change in (("plain", lambda each: each), ("hostile", hostile)))
    for baseline in (False, True):
        calm, wild = (page(gather(each), gather(each[1:2]).runs if baseline else ()) for each in (plain, odd))
        a, b = Page(calm), Page(wild)
        assert set(a.tags) == set(b.tags) and a.attributes == b.attributes and set(b.links) <= set(a.links)
        assert "49" not in "".join(b.words.get("", [])) or "{{7*7}}" in wild.replace("&#39;", "'")
        assert not set("\u202e\x1b") & set(wild)
        assert wild.count("<script") == 1 and "&lt;script&gt;" in wild


def test_the_page_allows_no_script_but_its_own(files: dict[str, str]) -> None:
    text = page(gather([files["0.26.0"]]))
    policy = next(line for line in text.splitlines() if "Content-Security-Policy" in line)
    assert "default-src 'none'" in policy and policy.count("'sha256-") == 2 and "unsafe" not in policy


def test_text_of_files_is_never_markdown(tmp_path: Path) -> None:
    text = markdown(gather(everything(tmp_path, hostile)))
    outside = [part for index, part in enumerate(_without_code(text)) if index % 2 == 0]
    for part in outside:
        bare = part.replace("<details><summary>", "").replace("</summary>", "").replace("</details>", "")
        assert "<" not in bare and "@" not in bare and "](" not in bare.replace("\\](", "")
    assert not set("\u202e\x1b") & set(text)


def _without_code(text: str) -> list[str]:
    """Parts outside and inside of code spans in turn, as CommonMark finds them: a span ends at a run of as many backticks."""
    import re

    parts, rest = [], text
    while found := re.search(r"(?<![\\`])(`+)(?!`)(.*?)(?<!`)\1(?!`)", rest, re.DOTALL):
        parts += [rest[: found.start()], found[2]]
        rest = rest[found.end() :]
    return [*parts, rest]


# -- files -------------------------------------------------------------------------------------------------------


def test_a_picture_is_a_png_with_a_map_a_mode(files: dict[str, str]) -> None:
    pytest.importorskip("matplotlib", reason="NOT RUN: needs matplotlib (extra `report`)")
    content = picture(gather([files["0.26.0"]]), files["0.26.0"])
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_a_scenario_that_is_none_is_named(tmp_path: Path) -> None:
    odd = run(Scenario(release="reference")).to_dict() | {"outcome": "recomputed", "scenario": {"mode": "wirte"}}
    with pytest.raises(InputError, match=r"odd.json: scenario: mode: 'wirte' is not one of its values"):
        gather([written(tmp_path, "odd.json", [odd])])


def test_files_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    places = {Path(place).stem: place for place in everything(tmp_path, lambda each: each)}
    gather(list(places.values()))
    edits: list[tuple[str, dict[str, Any], str]] = [
        ("compat", {"works": "all", "worst": ""}, "works: 'all', and has its pairings"),
        ("explore", {"failures": 0}, "0 failures, and has groups of 1"),
        ("confirm", {"verdict": "CONFIRMED"}, "'CONFIRMED', and has corrupt before and ok after on the model tier"),
        ("confirm", {"after": json.loads(Path(places["confirm"]).read_text())[0]["before"]}, "corrupt before and corrupt after"),
    ]
    for name, edit, says in edits:
        (row,) = json.loads(Path(places[name]).read_text())
        with pytest.raises(InputError, match=f"contradicts itself: it says .*{says}"):
            gather([written(tmp_path, "edited.json", [row | edit])])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"router": "x", "works": "all", "pairings": 3}, "is none of kvcover's results"),
        ({"groups": [], "runs": "many", "failures": 0}, "is none of kvcover's results"),
        ({"kind": "confirmation", "before": {}, "after": {}}, "is a confirmation without the result of before"),
        ({"verdict": 1}, "is no result of kvcover"),
        ([], "holds no result"),
    ],
)
def test_what_is_no_result_is_one_line(tmp_path: Path, row: Any, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(row))
    with pytest.raises(InputError, match=says):
        gather([str(path)])
