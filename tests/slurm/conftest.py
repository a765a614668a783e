"""A real Slurm: slurmctld on this machine, and a slurmd on each of four emulated hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import emulated
from surroundings import clean_environment

NODES = ("w0", "w1", "s0", "s1")
CORES = 4
CONFIG = """
ClusterName=herring
SlurmctldHost=ctl({here})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=5
{nodes}
PartitionName=gpu Nodes=w0,w1 Default=YES State=UP OverSubscribe=NO
PartitionName=cpu Nodes=s0,s1 State=UP
"""


class Cluster:
    """The daemons, and what a user types."""

    def __init__(self, hosts: emulated.Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.addresses = dict(zip(NODES, hosts.addresses, strict=True))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.env = {**clean_environment(), "SLURM_CONF": str(folder / "slurm.conf"), "HERRING_INTERFACE": "eth0"}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"

    def start(self) -> None:
        folder, port = self.folder, 20000 + os.getpid() % 10000
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={CORES} State=UNKNOWN" for name, address in self.addresses.items()
        )
        text = CONFIG.format(here=self.hosts.here, folder=folder, port=port, node_port=port + 1, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.hosts.here} ctl\n{names}")
        # There is no name server: asking this machine's takes torch's store 10 s a time.
        (folder / "resolv.conf").write_text("")
        self._start_munge()
        self._start(["unshare", "-u", "sh", "-c", "hostname ctl && exec slurmctld -D -i"], "slurmctld")
        for name, namespace in zip(NODES, self.hosts.namespaces, strict=True):
            # Not `ip netns exec`: that mounts another /sys, in which slurmd misses the control groups.
            mounts = " && ".join(f"mount --bind {folder}/{file} /etc/{file}" for file in ("hosts", "resolv.conf"))
            line = f"hostname {name} && {mounts} && exec slurmd -D -N {name}"
            enter = ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "-u", "-m", "sh", "-c", line]
            self._start(enter, name)
        self.await_that(lambda: self.user("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 4, 40, "idle nodes")

    def _start_munge(self) -> None:
        folder = self.folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._start(["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files], "munged")
        self.await_that((folder / "munge.socket").exists, 10, "munged")

    def _start(self, command: list[str], name: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            )

    def await_that(self, is_so, limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.out")]
                pytest.fail(f"no {what} within {limit_s:g} s\n" + "\n".join(logs))
            time.sleep(0.1)

    def stop(self) -> None:
        """The jobs, the daemons, and whatever is left on the hosts."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.user("scancel", "--state=RUNNING", "--state=PENDING", "-u", "root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for name in NODES:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()

    def user(self, *command: str, folder: Path | None = None, limit_s: float = 60) -> str:
        """What a command of the user prints, outside of the nodes."""
        done = subprocess.run(
            command,
            env=self.env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return done.stdout + (f"\n{done.stderr}" if done.returncode else "")

    def pids(self, node: str) -> list[int]:
        """All processes on the node, slurmd among them."""
        namespace = self.hosts.namespaces[NODES.index(node)]
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def find(self, node: str, *words: str) -> list[int]:
        """The processes on the node whose command line has all these words."""
        found = []
        for pid in self.pids(node):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if all(word.encode() in line for word in words):
                    found.append(pid)
        return found

    def left(self) -> list[str]:
        """The command lines on all nodes, but for slurmd's."""
        lines = []
        for name in NODES:
            for pid in self.pids(name):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if line and not line.startswith(("slurmd ", "/usr/sbin/slurmd ")):
                        lines.append(f"{name}: {line}")
        return lines


class Submitted:
    """A batch job."""

    def __init__(self, cluster: Cluster, folder: Path, script: str) -> None:
        self.cluster = cluster
        self.folder = folder
        (folder / "job.sh").write_text(script)
        said = cluster.user("sbatch", "--parsable", "--output=job.out", "job.sh", folder=folder)
        assert said.strip().isdigit(), said
        self.number = said.strip()

    @property
    def output(self) -> str:
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else ""

    def states(self) -> list[tuple[str, str]]:
        """JobState and ExitCode of each component."""
        shown = self.cluster.user("scontrol", "-o", "show", "job", self.number)
        jobs = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines()]
        return [(job["JobState"], job["ExitCode"]) for job in jobs if "JobState" in job]

    def finish(self, limit_s: float = 60) -> list[tuple[str, str]]:
        """Waits for its end; states() then."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        def is_over() -> bool:
            states = self.states()
            return bool(states) and all(state in over for state, _ in states)

        self.cluster.await_that(is_over, limit_s, f"end of the job, which is {self.states()}:\n{self.output}")
        return self.states()

    def await_output(self, text: str, limit_s: float = 60) -> None:
        self.cluster.await_that(lambda: text in self.output, limit_s, f"{text!r} in {self.output!r}")

    def await_nothing_left(self, limit_s: float = 15) -> None:
        self.cluster.await_that(lambda: not self.cluster.left(), limit_s, f"end of {self.cluster.left()}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    for program in ("slurmctld", "slurmd", "munged"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"needs {program} (make test-slurm installs it)")
    for hosts in emulated.made(len(NODES), tmp_path_factory.mktemp("emulated")):
        folder = tmp_path_factory.mktemp("slurm")
        folder.chmod(0o755)
        made = Cluster(hosts, folder)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a batch script, in the test's folder."""
    made = []

    def make(script: str) -> Submitted:
        made.append(Submitted(cluster, tmp_path, script))
        return made[-1]

    yield make
    for each in made:
        cluster.user("scancel", each.number)
        each.await_nothing_left()
