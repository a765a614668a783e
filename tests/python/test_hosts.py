"""Which hosts, and what on which: the pure parts of herringrun over hosts."""

from __future__ import annotations

import argparse
import os
import random
import selectors
import subprocess

import pytest

from herring import HerringError
from herring._launch._agent_link import Link
from herring._launch._commands import Site, commands_of, shared_environment
from herring._launch._hosts import Host, allot, parse_hostfile, parse_hosts, seats_of
from herring._launch._options import parse
from herring._launch._protocol import MAGIC, Decoder, Kind, ProtocolError, binary, fields_of, message, split_binary
from herring._launch._rsh import Shell, remote_command, why_not
from herring._launch._where import where


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:2", [("a", 4), ("b", 2)]),
        ("a", [("a", 1)]),
        ("me@a.b-c:2, 10.0.0.1:3", [("me@a.b-c", 2), ("10.0.0.1", 3)]),
        ("[fd00::1]:2,[fd00::2]", [("fd00::1", 2), ("fd00::2", 1)]),
        ("a:1,b:1,a:2", [("a", 3), ("b", 1)]),
    ],
)
def test_hosts(text, hosts):
    assert [(host.address, host.slots) for host in parse_hosts(text, "-H")] == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a:", "a:0", "a:x", "a:-1", "fd00::1", "a b:1", "-oProxyCommand=x", "a;b", "a:1:2"]
)
def test_what_is_no_list_of_hosts(text):
    """One that begins with a dash would be an option of ssh."""
    with pytest.raises(HerringError, match="-H"):
        parse_hosts(text, "-H")


def test_a_hostfile_of_open_mpi_or_horovod():
    text = """
# the GPU machines
a slots=4
b:2             # as in -H
me@c slots = 3 max-slots=8
d max_slots=2
a slots=1
"""
    hosts = [(host.address, host.slots) for host in parse_hostfile(text, "--hostfile h")]
    assert hosts == [("a", 5), ("b", 2), ("me@c", 3), ("d", 1)]
    assert parse_hostfile("d", "--hostfile h", slots=8) == [Host("d", 8)]


@pytest.mark.parametrize("line", ["a 4", "a slots", "a slots=", "a cores=3", "a slots=0", "a:2:3", "a b"])
def test_what_is_wrong_in_a_hostfile_is_named_by_its_line(line):
    with pytest.raises(HerringError, match=r"--hostfile h, line 2"):
        parse_hostfile(f"ok slots=1\n{line}\n", "--hostfile h")
    with pytest.raises(HerringError, match="names no host"):
        parse_hostfile("# nothing\n", "--hostfile h")


def test_hosts_are_filled_in_order():
    hosts = [Host("a", 2), Host("b", 3)]
    assert allot(hosts, 3, "-np 3", "") == [0, 0, 1]
    with pytest.raises(HerringError, match=r"-np 6: the hosts have 5 slots \(a:2, b:3\)"):
        allot(hosts, 6, "-np 6", "name more hosts")


def test_cross_ranks_are_horovods():
    """Ranks of one local rank form a group over the hosts that have one."""
    seats = seats_of([0, 0, 0, 1, 2, 2])
    assert [(s.local_rank, s.local_size) for s in seats] == [(0, 3), (1, 3), (2, 3), (0, 1), (0, 2), (1, 2)]
    assert [(s.cross_rank, s.cross_size) for s in seats] == [(0, 3), (0, 2), (0, 1), (1, 3), (2, 3), (1, 2)]


def found(*options: str):
    return where(parse([*options, "true"]))


def test_servers_have_hosts_of_their_own_or_the_workers():
    assert found("-np", "2") is None
    both = found("-H", "a:2,b:2", "--server-hosts", "c,d:2,a")
    assert [host.name for host in both.hosts] == ["a", "b", "c", "d"]
    assert (both.workers, both.servers) == ([0, 0, 1, 1], [2, 3, 3, 0])
    assert found("-H", "a:2,b:2", "--servers", "3").servers == [0, 1, 0]
    assert found("-np", "2", "-H", "a:2,b:2", "--servers", "2").servers == [0, 0], "b has nothing of this job"
    assert found("-H", "a,b", "--slots-per-host", "3").workers == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server-hosts", "c", "-np", "2"], "-H"),
        (["-H", "a", "--hostfile", "b"], "one of them"),
        (["-H", "localhost,b"], "--master-addr"),
        (["-H", "a", "--server-hosts", "c", "--servers", "2"], "--servers 2"),
        (["--hostfile", "/no/such/file"], "No such file"),
        (["-np", "3", "-H", "a:2"], "slots"),
    ],
)
def test_what_cannot_be_placed(options, words):
    with pytest.raises(HerringError, match=words):
        found(*options)


def test_what_a_rank_gets_on_each_host():
    args = argparse.Namespace(elastic=False, restart_servers=0, min_workers=1, stdin="0", wdir=None, command=["x"])
    site = Site([Host("u@a", 2), Host("b", 1)], [0, 0, 1], [1], "a", [1, 2, 3], [8, 2], "/py")
    base = {"HERRING_RENDEZVOUS": "of another job", "RANK": "9"}
    commands = commands_of(args, base, site)
    first, last, server = (commands[name] for name in ("rank 0", "rank 2", "server 0"))
    assert (first.environment["MASTER_ADDR"], first.environment["HERRING_HUB"]) == ("a", "a:2")
    assert (first.environment["OMP_NUM_THREADS"], last.environment["OMP_NUM_THREADS"]) == ("4", "2")
    assert (first.takes_input, last.takes_input, last.host, server.host) == (True, False, 1, 1)
    assert last.environment["HOROVOD_HOSTNAME"] == "b"
    assert server.arguments[0] == "/py"
    assert server.arguments[-3:] == ["server", "--rank", "0"]
    assert "RANK" not in server.environment
    assert "HERRING_RENDEZVOUS" not in first.environment
    assert len({command.environment["HERRING_SECRET"] for command in commands.values()}) == 1


def test_a_server_does_not_take_the_herring_of_the_current_folder(clean_env, tmp_path):
    """In a checkout after `pip install .`: the checkout has no native modules."""
    (tmp_path / "herring").mkdir()
    (tmp_path / "herring" / "__init__.py").write_text("raise ImportError('no native module here')\n")
    args = argparse.Namespace(elastic=True, restart_servers=0, min_workers=1, stdin="0", wdir=None, command=["x"])
    commands = commands_of(args, {}, Site([Host("a", 1)], [0], [0], "a", [1, 2, 3], [8]))
    for name in ("server 0", "rendezvous"):
        command = [*commands[name].arguments, "--help"]
        done = subprocess.run(
            command, env=clean_env, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr


def test_what_describes_this_machine_stays_here():
    own = {"HOME": "/h", "PATH": "/p", "SSH_AUTH_SOCK": "s", "XDG_RUNTIME_DIR": "x", "HERRING_LOG": "info"}
    assert shared_environment(own, {"HOME": "/asked/for"}) == {
        "PATH": "/p",
        "HERRING_LOG": "info",
        "HOME": "/asked/for",
    }


def test_the_command_line_of_ssh():
    shell = Shell(port=2222, identity_file="key", connect_s=5)
    line = shell.command_line("me@a", remote_command("/a folder/python"))
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-p", "2222", "-i", "key"]
    assert line[:-1] == ["ssh", *options, "me@a"]
    assert line[-1].startswith("exec '/a folder/python' -c ")
    assert Shell(("lsh", "-x")).command_line("a", "c") == ["lsh", "-x", "a", "c"]


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (255, "me@a: Permission denied (publickey,password).", "without asking for a password"),
        (255, "Host key verification failed.", "connect once by hand"),
        (255, "ssh: connect to host a port 22: No route to host", "No route to host"),
        (1, "ModuleNotFoundError: No module named 'herring'", "has no Herring"),
        (127, "sh: 1: exec: /py: not found", "there is no /py"),
        (139, "", "ended with 139"),
        (-9, "", "killed by signal 9"),
    ],
)
def test_why_a_host_does_not_answer(code, said, words):
    text = why_not("a", Shell(), "/py", code, f"Welcome to a\n{said}\n")
    assert text.startswith("a: ")
    assert words in text


def test_frames_in_any_pieces():
    frames = [message(Kind.HELLO, name="a\udcff"), binary(Kind.DATA, 7, b"\0\n"), message(Kind.BYE)]
    data = b"Welcome\n" + MAGIC + b"".join(frames)
    for size in (1, 2, 5, 1000):
        decoder = Decoder(awaits_magic=True)
        came = [frame for at in range(0, len(data), size) for frame in decoder.feed(data[at : at + size])]
        assert [kind for kind, _ in came] == [Kind.HELLO, Kind.DATA, Kind.BYE]
        assert fields_of(came[0][1]) == {"name": "a\udcff"}
        assert split_binary(came[1][1]) == (7, b"\0\n")
        assert decoder.noise == b"Welcome\n"


def frames_in(data: bytes, awaits_magic: bool) -> list[object]:
    decoder = Decoder(awaits_magic)
    return [fields_of(body) for at in range(0, len(data), 64) for _, body in decoder.feed(data[at : at + 64])]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_frame_is_an_error_and_never_more(seed):
    dice = random.Random(seed)
    with pytest.raises(ProtocolError):
        frames_in(dice.randbytes(1 << 16) + b"\xff" * 64, awaits_magic=False)
    with pytest.raises(ProtocolError):
        frames_in(dice.randbytes(1 << 17), awaits_magic=True)


def test_the_end_of_a_stream_and_room_in_its_pipe_may_come_in_one_turn():
    """The second of the two finds a stream that is closed, and must not touch the file that has its number now."""
    with selectors.DefaultSelector() as selector:
        link = Link(0, Host("a", 1), selector)
        reader, writer = os.pipe()
        link.add_stream(7, writer)
        size = 1 << 20
        link.deliver(7, b"x" * size)
        (waiting,) = selector.get_map().values()
        taken = 0
        while taken < size:  # A reader comes, and the last of the data with the end of it.
            taken += len(os.read(reader, size))
            link.pump(waiting.data[1])
        link.deliver(7, b"")
        spare = os.open(os.devnull, os.O_WRONLY)
        assert spare == writer, "the number is in use again"
        owner, stream = waiting.data
        owner.pump(stream)
        os.fstat(spare)
        os.close(spare)
        os.close(reader)
