"""Processes that are forked: after the parent's job, and during it."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time

import pytest

import herring

CHILDREN = 3


def test_children_of_a_parent_that_has_shut_down_have_jobs_of_their_own(job):
    job.start(fork_after_shutdown, env=job.master())
    [outcome] = job.finish()
    assert outcome.result == [[1.0] * CHILDREN] * 2 + [7.0]


def test_so_do_children_over_the_network(job):
    job.start(fork_after_shutdown, env={**job.master(), "HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"})
    [outcome] = job.finish()
    assert outcome.result == [[1.0] * CHILDREN] * 2 + [7.0]


def fork_after_shutdown():
    herring.init(rank=0, size=1)
    herring.allreduce(1.0)
    herring.shutdown()
    context = multiprocessing.get_context("fork")
    means = []
    for _ in range(2):
        with context.Pool(CHILDREN) as pool:
            means.append(pool.map(average_rank, range(CHILDREN), chunksize=1))
    herring.init(rank=0, size=1)
    return [*means, float(herring.allreduce(7.0))]


def average_rank(rank):
    herring.init(rank=rank, size=CHILDREN, join_timeout_s=20)
    mean = float(herring.allreduce(float(rank)))
    herring.shutdown()
    return mean


def test_children_of_torch_processes_that_destroyed_their_group(job):
    pytest.importorskip("torch")
    job.start(fork_after_destroy)
    [outcome] = job.finish()
    assert outcome.result == [[3.0] * CHILDREN] * 2


def fork_after_destroy():
    import torch.distributed as dist

    dist.init_process_group("herring", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    dist.destroy_process_group()
    context = multiprocessing.get_context("fork")
    sums = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder, context.Pool(CHILDREN) as pool:
            arguments = [(rank, f"{folder}/store") for rank in range(CHILDREN)]
            sums.append(pool.starmap(sum_ranks, arguments, chunksize=1))
    return sums


def sum_ranks(rank, file):
    import torch
    import torch.distributed as dist

    dist.init_process_group("herring", init_method=f"file://{file}", rank=rank, world_size=CHILDREN)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def test_a_child_of_a_running_job_is_refused_whatever_it_calls(job):
    for pid, texts, mean in job.run(fork_during_a_job, 2):
        assert len(texts) == 4
        for text in texts:
            assert f"forked from process {pid}" in text, text
            assert "spawn" in text
            assert "shutdown()" in text, "it does not say that forking after shutdown() is fine"
        assert mean == 0.5


def fork_during_a_job():
    herring.init()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            tell_refusals(writer, herring.init, herring.rank)
            grandchild = os.fork()
            if grandchild == 0:
                tell_refusals(writer, lambda: herring.init(rank=0, size=1), herring.barrier)
                os._exit(0)
            os.waitpid(grandchild, 0)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        texts = said.read().splitlines()
    os.waitpid(child, 0)
    return [os.getpid(), texts, float(herring.allreduce(float(herring.rank())))]


def tell_refusals(writer, *calls):
    for call in calls:
        try:
            call()
            text = "no error"
        except herring.ShutdownError as error:
            text = str(error)
        os.write(writer, text.encode() + b"\n")


def test_a_child_that_lives_on_does_not_keep_a_dead_parents_job_alive(job):
    """A DataLoader's worker has copies of the parent's sockets: the others must not take those for the parent."""
    started = time.monotonic()
    for rank in range(2):
        job.start_worker(die_and_leave_a_child, rank, 2, env={"HERRING_DEAD_AFTER_S": "3"})
    lost, survivor = sorted(job.finish([0, -signal.SIGKILL], timeout=40), key=lambda outcome: outcome.code)
    assert "worker 1" in survivor.result
    assert time.monotonic() - started < 20
    assert lost.code == -signal.SIGKILL


def die_and_leave_a_child():
    herring.init()
    herring.barrier()
    if herring.rank() == 1:
        child = os.fork()
        if child == 0:
            for stream in (0, 1, 2):
                os.close(stream)
            time.sleep(25)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        herring.allreduce(1.0)
    except herring.PeerLostError as error:
        return str(error)
    sys.exit("no error")
