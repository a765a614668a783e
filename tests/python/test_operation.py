"""Operations in several steps: what is called at their end, and by whom."""

import threading

import numpy as np

import herring
from herring._context import process
from herring._operation import Operation


class Work:
    """Work that has ended, and calls `before` on who asks to be called at its end."""

    def __init__(self, before=lambda: None):
        self.before = before

    def done(self):
        return True

    def wait(self, timeout, *, blocks=False):
        return True

    def check(self):
        pass

    def on_done(self, callback):
        self.before()
        callback()


def test_work_that_ends_at_once_calls_back_without_a_lock():
    """Who holds a lock asks an operation how it is, while what is called at its end waits for that lock."""
    lock = threading.RLock()
    asks = threading.Event()
    asked = []

    def ask():
        with lock:
            asks.set()
            asked.append(operation.is_done())

    def begin_asking():
        threading.Thread(target=ask, daemon=True).start()
        assert asks.wait(10)

    def at_the_end():
        with lock:
            ended.set()

    def steps():
        yield [Work()]
        yield [Work(begin_asking)]
        return "result"

    ended = threading.Event()
    operation = Operation("a test", steps(), 10.0, lambda error: error)
    operation.on_done(at_the_end)
    threading.Thread(target=lambda: operation.begin(watched=True), daemon=True).start()
    assert ended.wait(10), "each waits for the other's lock"
    assert operation.wait() == "result"
    assert asked == [True]


def test_who_looks_at_an_operation_does_not_begin_it():
    """As the timeline may, and who calls by the same name."""
    begun = []

    def steps():
        begun.append(True)
        yield [Work()]
        return "result"

    operation = Operation("a test", steps(), 10.0, lambda error: error)
    assert not operation.is_done()
    assert not begun
    operation.begin(watched=True)
    assert operation.wait() == "result"


def late_end_of_a_name():
    herring.init()
    array = np.ones(2)
    ends = []
    on_done, Operation.on_done = Operation.on_done, lambda self, callback: ends.append(callback)
    herring.alltoall(array, name="x")
    Operation.on_done = on_done
    herring.alltoall(array, name="x", async_op=True)
    uses = process.current().uses
    uses.in_flight[0, "alltoall.x"] = later = object()
    for end in ends:
        end()
    assert uses.in_flight == {(0, "alltoall.x"): later}, "the name is the later operation's"


def test_an_operation_that_is_told_late_of_its_end_frees_no_other_ones_name(job):
    job.start_worker(late_end_of_a_name, 0, 1)
    job.finish()
