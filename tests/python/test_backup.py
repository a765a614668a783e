"""Backup workers in jobs of real processes: who is late is left out, and gets what the others have.

Rank r contributes 10^r, so a sum names who is in it.
"""

import os
import signal
import time

import numpy as np
import pytest

import herring

LOOPBACK = {"HERRING_INTERFACE": "lo"}
LATE = 2


def run(job, function, size, servers=1, timeout=90, codes=None, **settings):
    """`function` on `size` workers with `servers` server processes; what each worker returned, by rank."""
    env = {**LOOPBACK, "HERRING_SERVERS": str(servers), **{f"HERRING_{k.upper()}": str(v) for k, v in settings.items()}}
    for rank in range(size):
        job.start_worker(function, rank, size, env=env)
    for rank in range(servers):
        place = {"WORLD_SIZE": str(size), **job.master()}
        job.start(serve, {"rank": rank}, {**env, **place})
    wanted = None if codes is None else [*codes, *[0] * servers]
    return [outcome.result for outcome in job.finish(wanted, timeout)][:size]


def serve(rank):
    from herring._job import join_as_server

    server_job = join_as_server(rank)
    server = server_job.start()
    try:
        server.run()
    except herring.HerringError as error:
        return str(error)
    finally:
        server.close()
        server_job.close()
    return "served"


def ranks_in(total):
    """The ranks whose power of ten is in the sum; anything else in it is an error."""
    digits = str(int(total))[::-1]
    assert float(total) == int(total), total
    assert set(digits) <= {"0", "1"}, total
    return [rank for rank, digit in enumerate(digits) if digit == "1"]


def check_agreement(results):
    """All ranks saw the same sums and the same contributors, and these fit."""
    steps = [result["steps"] for result in results]
    for rank, mine in enumerate(steps):
        assert mine == steps[0], f"rank {rank} saw something else than rank 0"
    for total, contributors in steps[0]:
        assert ranks_in(total) == contributors
    dropped = [0] * len(results)
    for _, contributors in steps[0]:
        for rank in set(range(len(results))) - set(contributors):
            dropped[rank] += 1
    for result in results:
        assert result["dropped"] == {str(rank): count for rank, count in enumerate(dropped) if count}
    return [contributors for _, contributors in steps[0]]


def one_step(count, **arguments):
    """The sum's one value (all elements must be alike) and who is in it."""
    values = np.full(count, 10.0 ** herring.rank())
    handle = herring.allreduce(values, "sum", backup=True, async_op=True, **arguments)
    contributors = handle.contributors()
    result = handle.wait()
    assert (result == result[0]).all()
    return [float(result[0]), contributors]


def finish(steps, **more):
    result = {"steps": steps, "dropped": herring.stats()["dropped_contributions"], **more}
    herring.shutdown()
    return result


@pytest.mark.parametrize(
    ("servers", "settings"),
    [
        (0, {}),
        (1, {}),
        (2, {"lanes": 2}),
        (1, {"intra_node": "on"}),
        (1, {"checksum": "on"}),
    ],
    ids=["embedded", "one server", "four lanes", "host first", "checksums"],
)
def test_who_sleeps_is_left_out_and_gets_the_same_result(job, servers, settings):
    setting = {"backup_workers": 1, "part_bytes": "1MB", "backup_grace_s": 0.3, **settings}
    results = run(job, sleeps_now_and_then, 4, servers, **setting)
    contributors = check_agreement(results)
    everybody, without = [0, 1, 2, 3], [0, 1, 3]
    assert contributors[0] == everybody
    assert contributors[2] == contributors[5] == contributors[8] == without
    # One clock for all processes; one such step is enough, on a machine that is busy in the others.
    called = results[LATE]["called"]
    assert any(all(results[rank]["ended"][step] < called[step] for rank in without) for step in range(len(called))), (
        "the others always waited for the late one"
    )


def sleeps_now_and_then():
    herring.init()
    herring.barrier()
    steps, called, ended = [], [], []
    for step, count in enumerate([3, 3, 3, 50_000, 50_000, 50_000, 900_000, 900_000, 900_000]):
        if step % 3 == 2:
            if herring.rank() == LATE:
                time.sleep(1)
        else:
            herring.barrier()  # All at the same place again.
        call = time.monotonic()
        steps.append(one_step(count))
        if step % 3 == 2:
            called.append(call)
            ended.append(time.monotonic())
    return finish(steps, called=called, ended=ended)


def test_two_of_four_may_be_late(job):
    results = run(job, two_sleep, 4, backup_workers=2, backup_grace_s=0)
    contributors = check_agreement(results)
    assert contributors[0] == [0, 3]
    assert all(len(each) >= 2 for each in contributors)


def two_sleep():
    herring.init()
    herring.barrier()
    time.sleep({1: 0.4, 2: 0.8}.get(herring.rank(), 0))
    return finish([one_step(20_000) for _ in range(30)])


def test_who_is_ever_late_is_waited_for_when_too_much_is_kept_for_it(job):
    results = run(job, ever_late, 3, backup_workers=1, backup_bytes="4MB", backup_grace_s=0)
    contributors = check_agreement(results)
    assert [0, 1] in contributors
    assert [0, 1, 2] in contributors, "it was never waited for, so what is kept has no bound"


def ever_late():
    """Steps of 1 MB; the late one takes 20 ms longer for each."""
    herring.init()
    herring.barrier()
    steps = []
    for _ in range(60):
        if herring.rank() == LATE:
            time.sleep(0.02)
        steps.append(one_step(131_072))
    return finish(steps)


def test_nobody_is_dropped_within_the_grace(job):
    results = run(job, slightly_late, 3, backup_workers=1, backup_grace_s=20)
    assert check_agreement(results) == [[0, 1, 2]] * 3


def slightly_late():
    herring.init()
    steps = []
    for count in (3, 1000, 200_000):
        time.sleep(0.1 * herring.rank())
        steps.append(one_step(count))
    return finish(steps)


def test_an_average_is_over_those_who_are_in(job):
    assert run(job, average, 3, backup_workers=1) == [[0.5, [0, 1]]] * 3


def average():
    herring.init()
    herring.barrier()
    if herring.rank() == LATE:
        time.sleep(0.5)
    handle = herring.allreduce_(np.full(1000, float(herring.rank())), backup=True, async_op=True)
    result = [float(handle.wait()[7]), handle.contributors()]
    herring.shutdown()
    return result


def test_many_at_once_by_name_beside_others(job):
    results = run(job, many, 3, 2, backup_workers=1, part_bytes="256KB")
    check_agreement(results)


def many():
    """Several under way, on each rank in another order, beside ordinary ones, which wait for everybody."""
    herring.init()
    rank = herring.rank()
    order = np.random.default_rng(rank).permutation(12)
    handles, sums = {}, {}
    for i in map(int, order):
        time.sleep(0.01 * rank)
        values = np.full(1 + 20_000 * i, 10.0**rank)
        handles[i] = herring.allreduce(values, "sum", name=f"g{i}", backup=True, async_op=True)
        if i % 4 == 0:
            sums[i] = herring.allreduce(values, "sum", name=f"all{i}", async_op=True)
    assert all((each.wait() == 111.0).all() for each in sums.values())
    steps = [[float(handles[i].wait()[-1]), handles[i].contributors()] for i in range(12)]
    steps += [[float(herring.allreduce(np.ones(1) * 10.0**rank, "sum", name="g0", backup=True)[0]), None]]
    steps[-1][1] = ranks_in(steps[-1][0])
    return finish(steps)


def test_it_changes_nothing_where_the_setting_is_off(job):
    assert run(job, setting_is_off, 2) == [[11.0, [0, 1]]] * 2


def setting_is_off():
    herring.init()
    if herring.rank() == 1:
        time.sleep(0.3)
    result = one_step(10)
    herring.shutdown()
    return result


def test_a_dead_worker_is_an_error_as_ever(job):
    results = run(job, one_dies, 3, backup_workers=1, codes=[0, 0, -signal.SIGKILL], dead_after_s=3)
    for text in results[:2]:
        assert "worker 2" in text, text


def one_dies():
    herring.init()
    herring.barrier()
    if herring.rank() == LATE:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert ranks_in(one_step(1000)[0]) == [0, 1]
    except herring.PeerLostError as error:
        return str(error)
    return "nobody said anything"


def test_who_comes_after_the_time_out_is_told_so(job):
    results = run(job, too_late, 3, backup_workers=1)
    assert results[:2] == ["11"] * 2
    assert "rank 2 had not" in results[2], results[2]


def too_late():
    herring.init()
    herring.barrier()
    if herring.rank() == LATE:
        time.sleep(2)
    try:
        text = f"{herring.allreduce(np.full(5, 10.0 ** herring.rank()), 'sum', backup=True, timeout=1)[0]:.0f}"
    except herring.HerringTimeoutError as error:
        text = str(error)
    herring.barrier()
    herring.shutdown()
    return text


def test_who_does_not_say_backup_disagrees(job):
    for text in run(job, disagrees, 3, backup_workers=1, backup_grace_s=20):
        assert "with backup workers" in text, text


def test_who_comes_late_and_disagrees_learns_it_alone(job):
    results = run(job, disagrees_late, 3, backup_workers=1, backup_grace_s=0)
    assert results[0] == results[2] == "no error", results
    assert "the others, who did not wait for it, had said" in results[1], results


def disagrees():
    herring.init()
    return call_that_disagrees()


def disagrees_late():
    herring.init()
    herring.barrier()
    if herring.rank() == 1:
        time.sleep(0.8)
    return call_that_disagrees()


def call_that_disagrees():
    try:
        herring.allreduce(np.ones(7), "sum", backup=herring.rank() != 1, timeout=20)
    except herring.MismatchError as error:
        return str(error)
    return "no error"


def test_only_sums_and_averages(job):
    for text in run(job, maximum, 2, backup_workers=1):
        assert "only sums and averages" in text


def maximum():
    herring.init()
    try:
        herring.allreduce(np.ones(7), "max", backup=True)
    except herring.InvalidArgumentError as error:
        herring.shutdown()
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"backup_workers": 2}, "it must be less"),
        ({"backup_workers": 1, "failover": "on"}, "HERRING_FAILOVER=on (environment) does not go together"),
        ({"backup_workers": 1, "elastic": "on"}, "HERRING_ELASTIC=on (environment) does not go together"),
        (
            {"backup_workers": 1, "rendezvous": "127.0.0.1:1"},
            "HERRING_RENDEZVOUS=127.0.0.1:1 (environment) does not go",
        ),
    ],
)
def test_settings_that_do_not_fit_are_an_error(job, settings, text):
    for said in run(job, starts, 2, 0, **settings):
        assert text in said


def starts():
    try:
        herring.init(join_timeout_s=30)
    except herring.InvalidArgumentError as error:
        return str(error)
    herring.shutdown()
    return "started"


def test_processes_that_disagree_about_it_are_told(job):
    for rank in range(2):
        env = {**LOOPBACK, "HERRING_INTRA_NODE": "off", "HERRING_BACKUP_WORKERS": str(rank)}
        job.start_worker(mismatch_of_settings, rank, 2, env=env)
    texts = [outcome.result for outcome in job.finish()]
    assert any("HERRING_BACKUP_WORKERS" in text and "settings differ" in text for text in texts), texts


def mismatch_of_settings():
    try:
        herring.init(join_timeout_s=30)
    except herring.HerringError as error:
        return str(error)
    return "started"
