"""System calls and sleeps as the kernel counts them, against code whose calls are known."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from rows import row

from herring._errors import UnavailableError
from herring.bench import _profile
from herring.bench._bounds import Links
from herring.bench._contender import Plan, timed_loop
from herring.bench._pattern import Pattern
from herring.bench._profile import Costs, Meter
from herring.bench._table import Table


def event_or_none():
    try:
        event = _profile.tracepoint()
        Meter(event).close()
    except UnavailableError:
        return None
    return event


counts = pytest.mark.skipif(event_or_none() is None, reason="needs root and tracefs")


def call_often(times):
    for _ in range(times):
        os.getppid()


@counts
def test_system_calls_of_this_thread_are_counted_one_by_one():
    meter = Meter(event_or_none())
    try:
        spent = meter.overhead()
        before = meter.read()
        call_often(100)
        assert (meter.read() - before).syscalls - spent == 100
    finally:
        meter.close()


@counts
def test_those_of_other_threads_count_too():
    begin, end = threading.Event(), threading.Event()

    def work():
        begin.wait()
        call_often(1000)
        end.set()

    thread = threading.Thread(target=work)
    thread.start()
    meter = Meter(event_or_none())
    before = meter.read()
    begin.set()
    end.wait()
    counted = (meter.read() - before).syscalls
    thread.join()
    meter.close()
    assert 1000 <= counted < 1100


@counts
def test_an_operation_is_counted_without_the_loop_around_it():
    pattern, array = Pattern("float32", "sum", 0, 1, 4), np.empty(4, np.float32)
    plan = Plan(5, 0, 2, event_or_none())
    turn = timed_loop(pattern, array, array, lambda: None, lambda: call_often(7), plan)
    assert turn.costs.syscalls == 3 * 7, "three of five are timed"


def test_sleeps_are_counted_always_and_calls_only_where_asked():
    pattern, array = Pattern("float32", "sum", 0, 1, 4), np.empty(4, np.float32)
    turn = timed_loop(pattern, array, array, lambda: None, lambda: time.sleep(0.01), Plan(5, 0))
    assert turn.costs.syscalls is None
    assert turn.costs.sleeps >= 5


def test_who_may_not_count_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(_profile, "_ROOTS", (tmp_path,))
    with pytest.raises(UnavailableError, match="Run as root, with tracefs mounted"):
        _profile.tracepoint()


def test_a_number_that_is_no_event_is_refused_and_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnavailableError, match="CAP_PERFMON"):
        Meter(1 << 40)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_table_has_two_columns_more():
    rows = [row("herring", "arena", 1, 1, costs=Costs(0.3, 60, 9))]
    table = Table(Links(2, 0, None), 2, [], with_profile=True)
    assert "calls/op   sleeps/op" in table.header()
    assert table.lines(rows)[0].split()[-2:] == ["30.0", "4.5"]
    unknown = [row("mpi", "private", 1, 1, costs=Costs(0.3, None, 9))]
    assert table.lines(unknown)[0].split()[-2:] == ["-", "4.5"]
