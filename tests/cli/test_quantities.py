"""Numbers as people read them."""

import pytest

from xpuc.cli.quantities import columns, count, duration, n_bytes, rate, ratio, size


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1024), "1.0 KiB"),
        (size(66_400_000), "63.3 MiB"),
        (size(5 << 40), "5,120.0 GiB"),
        (duration(0.0004), "0 ms"),
        (duration(0.84), "840 ms"),
        (duration(12.34), "12.3 s"),
        (duration(185), "3 min 5 s"),
        (rate(1234.56), "1,234.6 tok/s"),
        (ratio(101.3, 100), "+1.3 %"),
        (ratio(97, 100), "-3.0 %"),
        (ratio(1, 0), "-"),
        (count(1, "token"), "1 token"),
        (count(4096, "token"), "4,096 tokens"),
    ],
)
def test_for_people(shown, expected):
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("2K", 2048),
        ("1.5m", 3 << 19),
        ("20G", 20 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read(text, expected):
    assert n_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "20GB", "2 X", "1e9", "1,5G"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size"):
        n_bytes(text)


def test_columns_are_aligned_and_end_without_spaces():
    assert columns([("a", 1, "x"), ("bcd", 22, "")], right=[1], indent=2) == [
        "  a     1  x",
        "  bcd  22",
    ]
