from datetime import UTC, datetime, timedelta, timezone

from noetl_grpc.core.partitions import IdRange, plan


def test_an_empty_log_gets_three_quarters_in_both_layouts() -> None:
    planned = plan([], [], now=datetime(2026, 2, 1, tzinfo=UTC))

    assert [(item.name, item.lower, item.upper) for item in planned] == [
        ("event_2026_q1", 264905529753600000, 297520437657600000),
        ("event_2026_q1_standard", 529811059507200000, 595040875315200000),
        ("event_2026_q2", 297520437657600000, 330497733427200000),
        ("event_2026_q2_standard", 595040875315200000, 660995466854400000),
        ("event_2026_q3", 330497733427200000, 363837417062400000),
        ("event_2026_q3_standard", 660995466854400000, 727674834124800000),
    ]


def test_what_is_covered_is_left_out_and_gaps_are_filled() -> None:
    existing = [IdRange(None, 270000000000000000), IdRange(280000000000000000, 529811059507200000)]

    planned = plan(existing, [], now=datetime(2026, 2, 1, tzinfo=UTC))

    assert (planned[0].lower, planned[0].upper) == (270000000000000000, 280000000000000000)
    assert [item.name for item in planned] == [
        "event_2026_q1",
        "event_2026_q1_standard",
        "event_2026_q2_standard",
        "event_2026_q3_standard",
    ]


def test_a_taken_name_gets_a_number() -> None:
    planned = plan(
        [IdRange(1, 2)], ["event_2026_q1", "event_2026_q1_2"], now=datetime(2026, 2, 1, tzinfo=UTC)
    )

    assert planned[0].name == "event_2026_q1_3"


def test_the_quarter_is_that_of_utc() -> None:
    new_year_in_auckland = datetime(2027, 1, 1, 8, tzinfo=timezone(timedelta(hours=13)))

    assert plan([], [], now=new_year_in_auckland)[0].name == "event_2026_q4"
