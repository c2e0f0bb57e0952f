"""The generated page is what the records say now, and every measured claim in it has its rows."""

from __future__ import annotations

from kvcover.sim.releases.docs import DEDUCED, PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m kvcover.sim.releases.docs`"


def test_deduced_claims_are_measured_or_say_why_not() -> None:
    text = page()
    for deduced in DEDUCED:
        assert bool(deduced.rows) != bool(deduced.why_not), deduced.claim
        if deduced.rows:
            assert f"rows with `{deduced.rows}`" in text, deduced.claim
