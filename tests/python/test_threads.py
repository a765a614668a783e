"""Where the system gives no more threads, the user reads what to do, and nothing stays open."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, resource, time
import numpy
import herring, herring._job
os.setgid(65534)
os.setuid(54321)  # Nobody else's processes count; root has no limit.
before = len(os.listdir("/proc/self/task"))
for threads in range(4):
    resource.setrlimit(resource.RLIMIT_NPROC, (before + threads, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        herring.init()
    except herring.UnavailableError as error:
        assert "cannot start the thread" in str(error) and "ulimit -u" in str(error), error
    else:
        raise AssertionError(f"{threads} threads are enough")
deadline = time.monotonic() + 10  # The kernel shows a thread for a moment after it was joined.
while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
    time.sleep(0.01)
assert len(os.listdir("/proc/self/task")) == before
resource.setrlimit(resource.RLIMIT_NPROC, (1000, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
herring.init()
assert herring.allreduce(numpy.ones(3))[0] == 1
herring.shutdown()
"""

END = """
import os, resource
import numpy
import herring
os.setgid(65534)
os.setuid(54322)
herring.init()
assert herring.allreduce(numpy.ones(3))[0] == 1
threads = len(os.listdir("/proc/self/task"))
resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
assert herring.allreduce(numpy.ones(3), async_op=True).wait()[0] == 1
assert herring.server_counters() == [] and len(herring.stragglers()) == 1
herring.shutdown()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without processes")
def test_a_thread_that_cannot_be_started_is_an_error_that_says_what_to_do(bare_environment):
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without processes")
def test_a_job_ends_well_where_its_host_has_no_thread_left(bare_environment):
    """Data loaders of others may have used them up: what was trained is to be saved all the same."""
    ended = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
