"""What reports of ranks and schedulers become: who sent, dialled, wrote and was told, over one life or two."""

from __future__ import annotations

from kvcover.real_backend.driver.reports import Escaped, Post, RankReport, SchedulerReport, SentNotice
from kvcover.real_backend.driver.sightings import (
    Sight,
    early_rows,
    notice_rows,
    rank_rows,
    reads_done,
    sees_landings,
    sent_rows,
)
from kvcover.sim.kernel.events import ASTRAY, Took

OWNERS = {7301: "D0", 7302: "D1", 6101: "P0"}
SIGHT = Sight(OWNERS, [{"'tx-0'"}, {"'tx-1'"}], frozenset({"D0"}))


def test_a_message_that_leaves_says_who_sent_it_to_whom_and_if_nobody_is_there() -> None:
    sent = [SentNotice(5, "write_done", 7301, 0), SentNotice(6, "write_done", 9999, 0), SentNotice(7, "greeting", 7301, -1)]
    rows = list(sent_rows(SIGHT, "P0", sent))
    assert [row[:5] for row in rows] == [
        (5, "write_done_sent", "P0", "D0", 0),
        (6, "write_done_sent", "P0", "", 0),
        (6, "undelivered", "P0", "", 0),
    ]


def test_who_sent_what_was_heard_is_named_only_if_it_can_be_nobody_else() -> None:
    heard = RankReport("D0", notices=((9, {"type": "write_done", "transfer_id": "tx-0"}),))
    one = list(sent_rows(SIGHT, "P0", [SentNotice(5, "write_done", 7301, 0)]))
    two = [*one, *sent_rows(SIGHT, "P1", [SentNotice(5, "write_done", 7301, 0)])]
    other = [*one, *sent_rows(SIGHT, "P1", [SentNotice(5, "write_done", 7301, 1), SentNotice(5, "write_done", 7302, 0)])]
    assert [next(iter(notice_rows(SIGHT, heard, rows)))[2:5] for rows in (one, two, other, [])] == [
        ("D0", "P0", 0),
        ("D0", "", 0),
        ("D0", "P0", 0),
        ("D0", "", 0),
    ]


def test_what_prefill_hears() -> None:
    notices = (
        (1, {"type": "remote_blocks", "transfer_id": "tx-1", "block_notify_list": [3]}),
        (2, {"type": "remote_blocks", "transfer_id": "tx-1", "block_notify_list": []}),
        (3, {"type": "text", "transfer_id": "tx-0"}),
        (4, {"type": "write_done", "transfer_id": "tx-0"}),
    )
    rows = list(notice_rows(SIGHT, RankReport("P0", notices=notices), []))
    assert [(row[1], row[4]) for row in rows] == [("blocks_ready", 1), ("poisoned", 1), ("release", 0)]


def test_dials_and_batches_of_a_rank() -> None:
    batches = (
        Post(10, "write", "D0", 0, 1, done_ns=14),
        Post(11, "write", "D1", 0, 1, done_ns=15),
        Post(12, "write", "D0", 0, 2, "no"),
    )
    report = RankReport("P0", bound=((1, 6101),), dialled=((2, 7302), (3, 7302), (4, 9999), (5, 6101)), batches=batches)
    rows = list(rank_rows(SIGHT, report))
    assert [row[1:4] for row in rows] == [
        ("bound", "P0", ""),
        ("dialled", "P0", "D1"),
        ("dial_dead", "P0", ""),
        ("wrote", "P0", "D0"),
        ("wrote", "P0", "D1"),
        ("transfer_failed", "P0", "D0"),
    ]
    assert rows[3][6] == Took(4) and rows[4][6] is ASTRAY  # D1 holds nothing of anybody


def test_a_read_is_done_with_its_last_layer_if_none_failed() -> None:
    whole = RankReport("D0", batches=(Post(3, "read", "P0", 0, 1), Post(2, "read", "P0", 0, 0), Post(4, "read", "P0", 1, 0)))
    assert [row[:5] for row in reads_done(whole, 2)] == [(3, "told", "D0", "", 0)]
    failed = RankReport("D0", batches=(*whole.batches, Post(5, "read", "P0", 0, 1, "no")))
    assert not list(reads_done(failed, 2))


def test_a_layer_was_used_early_only_if_its_own_read_landed_after_its_own_use() -> None:
    """Of four layers used with cells missing one was late; what was never read, failed, or landed before was something else."""
    batches = (
        Post(1, "read", "P0", 0, 0, done_ns=50),  # used at 40
        Post(2, "read", "P0", 0, 1, done_ns=30),  # used at 41: what was there was wrong
        Post(3, "read", "P0", 0, 2, done_ns=60),  # used when nothing was missing
        Post(4, "read", "P0", 1, 0, "no"),
        Post(5, "write", "P1", 2, 0, done_ns=99),
    )
    rank = RankReport("D0", batches=batches, short=((40, 0, 0), (41, 0, 1), (42, 1, 0), (43, 2, 0)))
    assert list(early_rows(rank)) == [(40, "used_early", "D0", "P0", 0, 0, Took(10))]


def test_it_is_known_when_reads_landed_only_if_it_is_of_each() -> None:
    """The real library keeps no such time. What failed landed nowhere."""
    landed, failed, unknown = (
        Post(1, "read", "P0", 0, 0, done_ns=5),
        Post(1, "read", "P0", 0, 1, "no"),
        Post(1, "read", "P0", 0, 1),
    )
    assert sees_landings([RankReport("D0", batches=(landed, failed)), RankReport("D1")])
    assert not sees_landings([RankReport("D0", batches=(landed,)), RankReport("D1", batches=(unknown,))])


def test_a_rank_that_was_restarted_has_seen_what_it_saw_in_both_lives() -> None:
    first = RankReport(
        "P0", notices=((1, {}),), batches=(Post(1, "write", "D0", 0, 0),), warnings=("old",), bound=((1, 1),), dialled=((1, 2),),
        acted=((1, "f", "notice", "D0", 0, -1),), sent=(SentNotice(1, "x", 1, 0),), caught=(Escaped("P0", "c", "E", "t"),),
        last_step="first", short=((1, 0, 0),),
    )  # fmt: skip
    second = RankReport("P0", notices=((2, {}),), dialled=((2, 3),), last_step="second")
    both = second.after(first)
    assert both.notices == ((1, {}), (2, {})) and both.dialled == ((1, 2), (2, 3)) and both.last_step == "second"
    for name in ("batches", "warnings", "bound", "acted", "sent", "caught", "short"):
        assert getattr(both, name) == getattr(first, name)


def test_a_scheduler_reports_as_its_engine() -> None:
    report = SchedulerReport("D", sent=(SentNotice(5, "remote_blocks", 6101, 0),))
    assert [row[:5] for row in sent_rows(SIGHT, report.name, report.sent)] == [(5, "blocks_ready_sent", "D", "P0", 0)]
