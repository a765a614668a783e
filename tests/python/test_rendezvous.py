"""Every process works out the same meeting place from the same few values."""

import re
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import herring
from herring import _core, _rendezvous
from herring._job import join_as_server, join_as_worker, read_settings
from herring._rendezvous import Meeting, derived_ports, from_hub_setting, from_master


@given(st.integers(1, 65535))
def test_derived_ports_are_distinct_unprivileged_and_not_the_launchers(port):
    ports = derived_ports(port)
    assert len(set(ports)) == 4
    assert port not in ports
    assert all(1024 <= each <= 65535 for each in ports)


def test_derived_ports_are_as_documented():
    assert derived_ports(29500) == (30611, 31722, 32833, 33944)
    assert derived_ports(65000) == (1599, 2710, 3821, 4932)  # Wrapped: 66111 - 64512, and so on.


@given(
    st.sampled_from(["10.0.0.7", "node-a", "fd00::2", "localhost"]),
    st.integers(1, 65535),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
def test_meeting_survives_its_text(host, port, secret):
    meeting = Meeting(host, (port,), secret)
    assert Meeting.from_text(meeting.to_text()) == meeting


@pytest.mark.parametrize("text", ["", "host", "host:1", "host:0:", "host:x:", "host:1:zz"])
def test_a_bad_publication_is_refused(text):
    with pytest.raises(herring.InvalidArgumentError):
        Meeting.from_text(text)


def test_secret_is_not_printed():
    assert "hunter2" not in repr(Meeting("a", (1,), "hunter2"))


def test_hub_setting():
    assert from_hub_setting("node-a:7000", "s") == Meeting("node-a", (7000,), "s")
    assert from_hub_setting("[fd00::2]:7000", "") == Meeting("fd00::2", (7000,))
    for bad in ("node-a", ":7000", "node-a:", "node-a:70000", "node-a:x"):
        with pytest.raises(herring.InvalidArgumentError, match="HERRING_HUB"):
            from_hub_setting(bad, "")


def test_master():
    env = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
    assert from_master(env, "s") == Meeting("node-a", derived_ports(29500), "s")
    assert from_master(env, "").secret == "MASTER_PORT=29500"
    assert from_master({}, "") is None
    with pytest.raises(herring.InvalidArgumentError, match="MASTER_PORT is not set"):
        from_master({"MASTER_ADDR": "node-a"}, "")
    with pytest.raises(herring.InvalidArgumentError, match="MASTER_PORT"):
        from_master({"MASTER_ADDR": "node-a", "MASTER_PORT": "http"}, "")


def test_addresses():
    assert _rendezvous.interface_address("lo") == "127.0.0.1"
    assert _rendezvous.interface_address("10.1.2.3") == "10.1.2.3"
    assert _rendezvous.control_address(" lo, nosuch0") == "127.0.0.1", "the first of several"
    assert _rendezvous.control_address(",") is None
    with pytest.raises(herring.InvalidArgumentError, match="nosuch0"):
        _rendezvous.control_address("nosuch0")
    with pytest.raises(herring.InvalidArgumentError, match="nosuch0.*interfaces: .*lo"):
        _rendezvous.interface_address("nosuch0")
    assert _rendezvous.own_address("127.0.0.1") is None
    assert _rendezvous.published_address(True, "", "10.9.9.9") == "127.0.0.1"
    assert _rendezvous.published_address(False, "lo", None) == "127.0.0.1"


def test_the_hub_listens_on_the_interface_alone_where_one_is_named(monkeypatch):
    """What listens on all addresses can be reached from networks that the job has nothing to do with."""
    listening = _rendezvous.listening_address
    assert listening(True, "", None) == "127.0.0.1"
    assert listening(False, "", None) == ""
    assert listening(False, "lo", None) == "127.0.0.1"
    assert listening(False, "", "node-a") == ""
    assert listening(False, "lo", "localhost") == "localhost"
    monkeypatch.setattr(_rendezvous, "own_address", {"node-a": "10.1.1.1", "node-b": "10.2.2.2"}.get)
    assert listening(False, "10.1.1.1", "node-a") == "10.1.1.1"
    assert listening(False, "10.1.1.1", "node-b") == "", "the others look elsewhere"
    socket.inet_aton(_rendezvous.primary_address())
    assert _rendezvous.is_loopback("localhost")
    assert _rendezvous.is_loopback("::1")
    assert not _rendezvous.is_loopback("node-a")


class DictStore:
    """What Herring uses of torch's Store, over threads."""

    def __init__(self):
        self._values = {}
        self._changed = threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        return self._values[key]

    def wait(self, keys, timeout):
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
                raise RuntimeError(f"wait timeout after {timeout}")


def join_in_threads(count, join):
    """join(i) on `count` threads; their results or exceptions, by i."""
    results = [None] * count

    def one(index):
        try:
            results[index] = join(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def close_all(jobs):
    for each in reversed(jobs):
        each.close()


@pytest.fixture
def config(bare_environment):
    return read_settings({"join_timeout_s": 30})


def test_a_store_carries_the_address_and_a_random_secret(config):
    store = DictStore()
    jobs = join_in_threads(
        3, lambda i: join_as_worker(config, rank=i, size=3, store=store, generation=4, environment={})
    )
    assert [job.rank for job in jobs] == [0, 1, 2]
    assert len({job.client.job_id for job in jobs}) == 1
    assert len({job.config.secret for job in jobs}) == 1
    assert len(jobs[0].config.secret) == 64
    assert [job.hub is not None for job in jobs] == [True, False, False]
    blobs = join_in_threads(3, lambda i: jobs[i].client.exchange("greeting", f"from {i}".encode(), 20))
    assert blobs == [[b"from 0", b"from 1", b"from 2"]] * 3
    close_all(jobs)


def test_servers_meet_workers_through_master_even_where_there_is_a_store(bare_environment, job):
    config = read_settings({"join_timeout_s": 30, "servers": 2})
    env = {**job.master(), "WORLD_SIZE": "2"}
    store = DictStore()

    def join(index):
        if index < 2:
            return join_as_server(index, config, environment=env)
        return join_as_worker(config, rank=index - 2, size=2, store=store, environment=env)

    jobs = join_in_threads(4, join)
    assert [member.rank for member in jobs[0].client.servers] == [0, 1]
    assert [member.role for member in jobs[3].client.workers] == ["worker", "worker"]
    close_all(jobs)


def listen_where_the_hub_would(squatter, job):
    """Gives the job a port whose first derived port is free; another program may have the one that was chosen."""
    squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for _ in range(50):
        try:
            squatter.bind(("127.0.0.1", derived_ports(job.port)[0]))
        except OSError:
            job.take_another_port()
        else:
            squatter.listen()
            return
    pytest.fail("no port is free whose first derived port is free, too")


def test_the_hub_takes_the_next_port_where_the_first_is_taken(config, job):
    env = job.master()
    with socket.socket() as squatter:
        listen_where_the_hub_would(squatter, job)
        jobs = join_in_threads(2, lambda i: join_as_worker(config, rank=i, size=2, environment=env))
        assert jobs[0].hub.port == derived_ports(job.port)[1]
        close_all(jobs)


def test_two_jobs_whose_ports_overlap_do_not_mix(config, job):
    with socket.socket() as squatter:
        listen_where_the_hub_would(squatter, job)
        one = job.master()
        other = {**one, "MASTER_PORT": str(job.port + 1111)}

        def join(index):
            # The first job's hub takes the port that the second job's members try first.
            return join_as_worker(config, rank=index % 2, size=2, environment=one if index < 2 else other)

        jobs = join_in_threads(4, join)
    assert jobs[0].client.job_id == jobs[1].client.job_id
    assert jobs[2].client.job_id == jobs[3].client.job_id
    assert jobs[0].client.job_id != jobs[2].client.job_id
    close_all(jobs)


def test_hub_setting_wins_over_master(bare_environment, job):
    config = read_settings({"join_timeout_s": 30, "hub": f"127.0.0.1:{job.port}"})
    env = {"MASTER_ADDR": "192.0.2.99", "MASTER_PORT": "1"}
    jobs = join_in_threads(2, lambda i: join_as_worker(config, rank=i, size=2, environment=env))
    assert jobs[0].hub.port == job.port
    close_all(jobs)


def test_missing_workers_are_named(bare_environment, job):
    config = read_settings({"join_timeout_s": 1})
    errors = join_in_threads(2, lambda i: join_as_worker(config, rank=2 * i, size=3, environment=job.master()))
    for error in errors:
        assert isinstance(error, herring.HerringTimeoutError)
        assert isinstance(error, TimeoutError)
        # Beside the one that never came, the list may have those that gave up a moment earlier.
        assert re.search(r"waiting for workers? ([02], )?1\b", str(error)), error


def test_no_hub_at_all_says_where_it_looked(bare_environment, job):
    config = read_settings({"join_timeout_s": 0.5})
    with pytest.raises(herring.HerringTimeoutError, match=str(derived_ports(job.port)[0])):
        join_as_worker(config, rank=1, size=2, environment=job.master())


def test_a_store_without_the_key_times_out(bare_environment):
    config = read_settings({"join_timeout_s": 0.2})
    with pytest.raises(herring.HerringTimeoutError, match="worker 0 did not publish"):
        join_as_worker(config, rank=1, size=2, store=DictStore(), environment={})


def test_another_size_is_refused_with_both_numbers(bare_environment, job):
    config = read_settings({"join_timeout_s": 3})
    outcomes = join_in_threads(2, lambda i: join_as_worker(config, rank=i, size=2 + i, environment=job.master()))
    assert isinstance(outcomes[1], herring.MismatchError)
    assert "2" in str(outcomes[1])
    assert "3" in str(outcomes[1])


def test_no_way_to_meet_says_what_to_set(config):
    with pytest.raises(herring.InvalidArgumentError, match="MASTER_ADDR and MASTER_PORT"):
        join_as_worker(config, rank=0, size=2, environment={})


def test_servers_without_a_place_say_what_to_set(bare_environment):
    with pytest.raises(herring.InvalidArgumentError, match="HERRING_SERVERS is 1"):
        join_as_worker(read_settings({"servers": 1}), environment={})


@pytest.mark.parametrize(
    ("settings", "rank", "env", "names"),
    [
        ({}, 0, {}, "HERRING_SERVERS is 0"),
        ({"servers": 2}, 2, {"WORLD_SIZE": "1"}, "server rank 2"),
        ({"servers": 2}, 0, {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"servers": 2}, 0, {}, "MASTER_ADDR"),
        ({"servers": 2}, 0, {"WORLD_SIZE": "1"}, "MASTER_ADDR"),
        # mpiexec of MPICH with workers and servers in one world: it does not say so, but there are too many of them.
        (
            {"servers": 1},
            0,
            {"PMI_RANK": "2", "PMI_SIZE": "3"},
            "3 processes were started .*: start exactly 1 server, ",
        ),
        ({"servers": 2}, 0, {"PMI_RANK": "0", "PMI_SIZE": "1"}, "MASTER_ADDR"),
        ({"servers": 1}, 0, {"PMI_RANK": "2", "PMI_SIZE": "3", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_a_server_says_what_it_lacks(bare_environment, settings, rank, env, names):
    with pytest.raises(herring.InvalidArgumentError, match=names):
        join_as_server(rank, read_settings(settings), environment=env)


def test_joining_again_in_the_same_process(config, job):
    for generation in range(5):
        jobs = join_in_threads(2, lambda i: join_as_worker(config, rank=i, size=2, environment=job.master()))
        assert [each.size for each in jobs] == [2, 2], generation
        close_all(jobs)


def test_closed_objects_say_so(config):
    hub = _core.Hub(listen_host="127.0.0.1", ports=[], workers=1, job_id=1, config=config)
    hub.close()
    hub.close()
    with pytest.raises(herring.ShutdownError):
        _ = hub.port


def test_a_signal_handler_ends_a_join(bare_environment, job):
    """Ctrl-C while waiting for the others must not have to wait for the join's deadline."""
    import signal

    class Interrupted(Exception):
        pass

    def interrupt(signum, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            join_as_worker(read_settings({"join_timeout_s": 5}), rank=1, size=2, environment=job.master())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 3
