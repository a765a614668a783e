"""Sizes and rates mean what people think they mean, and t* is the formula of the design: else every ratio is off."""

import pytest

from herring import InvalidArgumentError
from herring.bench._bounds import Links, algbw, busbw, emulated_cluster, link_share, lower_bound
from herring.bench._units import format_rate, format_size, geometric_sizes, parse_rate, parse_size

MB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("100B", 100),
        ("64KB", 65536),
        ("64kb", 65536),
        ("1.5MB", 3 * MB // 2),
        ("25MiB", 25 * MB),
        ("1GB", 1 << 30),
    ],
)
def test_sizes_are_in_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "7", "2GB", "0.3KB", "-8", "64 XB", "1e6", "KB"])
def test_a_bad_size_is_named(text):
    with pytest.raises(InvalidArgumentError, match="size"):
        parse_size(text)


@pytest.mark.parametrize("size", [8, 100, 1000, 65536, 25 * MB, 1 << 30])
def test_a_formatted_size_reads_back(size):
    assert parse_size(format_size(size)) == size


def test_sizes_between_two_limits():
    assert geometric_sizes(8, 64, 2) == [8, 16, 32, 64]
    assert geometric_sizes(8, 100, 3) == [8, 24, 72]
    assert geometric_sizes(8, 12, 1.1) == [8], "sizes that round to the same are measured once"
    with pytest.raises(InvalidArgumentError, match="--factor"):
        geometric_sizes(8, 64, 1)
    with pytest.raises(InvalidArgumentError, match="--min"):
        geometric_sizes(64, 8, 2)


def test_rates_are_read_as_tc_writes_them():
    assert parse_rate("500mbit") == 500e6
    assert parse_rate("2.5gbit") == 2.5e9
    assert parse_rate("1000000") == 1e6
    assert parse_rate("none") is None
    assert format_rate(500e6) == "500 Mbit/s"
    for bad in ("500mbps", "fast", "0", "-1mbit"):
        with pytest.raises(InvalidArgumentError, match="rate"):
            parse_rate(bad)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 100])
def test_the_bound_is_the_rings_without_servers_and_one_with_as_many(n):
    assert link_share(n, 0) == pytest.approx(2 * (n - 1) / n)
    assert link_share(n, n) == pytest.approx(1.0)
    assert link_share(n, 5 * n) == pytest.approx(1.0), (
        "more servers than workers cannot help: a worker sends it all once"
    )


def test_the_bound_of_mixed_placements():
    assert link_share(4, 2) == pytest.approx(2 * 4 * 3 / (16 + 8 - 4))
    assert link_share(8, 2) == pytest.approx(2 * 8 * 7 / (64 + 16 - 4))
    shares = [link_share(8, k) for k in range(9)]
    assert shares == sorted(shares, reverse=True), "every further server host helps"


def test_the_design_pages_example():
    assert lower_bound(25 * MB, Links(8, 8, 500e6)) == pytest.approx(0.4194304)


def test_there_is_no_bound_without_a_rate_or_a_link():
    assert lower_bound(MB, Links(8, 8, None)) is None
    assert lower_bound(MB, Links(1, 0, 1e9)) is None
    assert lower_bound(65536, Links(2, 0, 1e9, burst_bytes=65536)) is None, "all of it passes at once"
    assert lower_bound(65544, Links(2, 0, 1e9, burst_bytes=65536)) is not None


def test_bandwidths_are_those_of_nccl_tests():
    assert algbw(1000, 0.5) == 2000
    assert busbw(1000, 0.5, 4) == 2000 * 2 * 3 / 4


def test_the_emulated_cluster_is_asked_only_where_there_is_one():
    assert emulated_cluster({}) == {}
    assert emulated_cluster({"EMULATED_CLUSTER": '{"rate": "1gbit"}'}) == {"rate": "1gbit"}
    for garbage in ("{", "[]"):
        with pytest.raises(InvalidArgumentError, match="EMULATED_CLUSTER"):
            emulated_cluster({"EMULATED_CLUSTER": garbage})
