"""Settings given to init() and in the environment: typed, checked, and named when they are wrong."""

import pytest

import herring
from herring import _core
from herring._job import read_settings


def test_arguments_win_over_the_environment(bare_environment, monkeypatch):
    monkeypatch.setenv("HERRING_LANES", "2")
    monkeypatch.setenv("HERRING_CHUNK_BYTES", "64KB")
    config = read_settings({"lanes": 3, "intra_node": False, "window": None})
    assert (config.lanes, config.chunk_bytes, config.intra_node) == (3, 64 << 10, "off")
    sources = {name: source for name, _, source in config.origins}
    assert sources["HERRING_LANES"] == "argument"
    assert sources["HERRING_CHUNK_BYTES"] == "environment"
    assert sources["HERRING_WINDOW"] == "default"


def test_every_row_of_the_table_has_an_attribute(bare_environment):
    config = read_settings({})
    for row in _core.config_table():
        attribute = row["name"].removeprefix("HERRING_").lower()
        assert hasattr(config, {"log": "log_level"}.get(attribute, attribute)), row
        assert row["help"]


def test_unknown_and_bad_settings_are_named(bare_environment, monkeypatch):
    with pytest.raises(herring.InvalidArgumentError, match="HERRING_CHUNK_BYTES"):
        herring.init(chunk_byte=1)
    with pytest.raises(ValueError, match="HERRING_LANES"):
        herring.init(lanes="many")
    monkeypatch.setenv("HERRING_NO_SUCH_THING", "1")
    with pytest.raises(herring.InvalidArgumentError, match="HERRING_NO_SUCH_THING"):
        herring.init()
    assert not herring.is_initialized()


def test_a_secret_is_not_shown(bare_environment):
    config = read_settings({"secret": "hunter2"})
    assert config.secret == "hunter2"
    assert "hunter2" not in repr(config) + repr(config.origins)
    assert config.with_secret("other").secret == "other"
    assert config.secret == "hunter2"


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_above_zero(bare_environment, timeout):
    with pytest.raises(herring.InvalidArgumentError, match="timeout"):
        herring.init(timeout=timeout)


def test_the_exception_tree():
    tree = [
        herring.InvalidArgumentError,
        herring.MismatchError,
        herring.HerringTimeoutError,
        herring.PeerLostError,
        herring.ProtocolError,
        herring.TransportError,
        herring.ShutdownError,
        herring.UnavailableError,
        herring.CancelledError,
        herring.InternalError,
    ]
    assert all(issubclass(each, herring.HerringError) for each in tree)
    assert issubclass(herring.HerringError, RuntimeError)
    assert issubclass(herring.InvalidArgumentError, ValueError)
    assert issubclass(herring.HerringTimeoutError, TimeoutError)


def test_public_names_exist():
    assert sorted(herring.__all__) == herring.__all__
    assert all(hasattr(herring, name) for name in herring.__all__)


def test_import_needs_neither_numpy_nor_torch(job):
    job.start(import_without_frameworks)
    [outcome] = job.finish()
    assert outcome.result == []


def import_without_frameworks():
    import sys

    return sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "torch", "mpi4py"})


def test_a_kubernetes_service_of_that_name_ends_no_job(job):
    """Its links are in the environment of every container of the namespace, whether or not anybody wants them."""
    links = {
        "HERRING_SERVICE_HOST": "10.96.0.17",
        "HERRING_SERVICE_PORT": "29500",
        "HERRING_PORT": "tcp://10.96.0.17:29500",
        "HERRING_PORT_29500_TCP": "tcp://10.96.0.17:29500",
        "HERRING_PORT_29500_TCP_ADDR": "10.96.0.17",
    }
    for rank in range(2):
        job.start_worker(start_twice, rank, 2, env=links)
    for outcome in job.finish():
        assert outcome.result == [0.5, 0.5]
        assert outcome.errors.count("warning") == 1, outcome.errors
        assert all(name in outcome.errors for name in links)
        assert "Kubernetes" in outcome.errors


def start_twice():
    means = []
    for _ in range(2):
        herring.init()
        means.append(float(herring.allreduce(float(herring.rank()))))
        herring.shutdown()
    return means
