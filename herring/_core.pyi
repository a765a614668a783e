"""The C++ runtime (bindings/core). Private. Everything raises the exceptions of herring._errors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, final

from typing_extensions import Buffer, CapsuleType

class ConfigRow(TypedDict):
    name: str
    type: str
    default: str
    range: str
    help: str

class ProviderReport(TypedDict):
    name: str
    domain: str
    usable: bool
    reason: str

class FabricReport(TypedDict):
    path: str
    version: str
    tried: list[str]
    providers: list[ProviderReport]
    chosen: int
    no_devices: str
    interfaces: list[ProviderReport]
    interface: int
    is_builtin: bool
    why_builtin: str
    no_builtin: str

class ProcessNeeds(TypedDict):
    """Of one process, at most; bytes besides tensors, shared memory and records."""

    lanes: int
    connections: int
    descriptors: int
    bytes: int
    registered_bytes: int
    record_bytes: int

class JobNeeds(TypedDict):
    lanes: int
    is_failover: bool
    chunk_bytes: int
    eager_bytes: int
    announce_credits: int
    most_eager_bytes: int
    most_announce_credits: int
    lane_windows: list[int]
    posted_limit: int
    posted_worker: int
    posted_messages: int
    posted_lane: int
    worker: ProcessNeeds
    hub_connections: int
    hub_descriptors: int
    server: ProcessNeeds

class ServerCounters(TypedDict):
    server: int
    place: str
    bytes_received: int
    bytes_sent: int
    messages: int
    memory_bound_bytes: int
    record_bound_bytes: int

class ServerProcessCounters(TypedDict):
    server: int
    place: str
    bytes_received: int
    bytes_sent: int
    ops: int
    memory_bound_bytes: int
    record_bound_bytes: int

class Straggler(TypedDict):
    rank: int
    announces: int
    mean_late_s: float
    last_share: float

class RuntimeStats(TypedDict):
    ops_completed: int
    ops_failed: int
    bytes_to_servers: int
    bytes_from_servers: int
    zero_copy_ops: int
    staged_ops: int
    damaged_messages: int
    resent_messages: int
    strangers: int
    dropped_contributions: dict[int, int]

@final
class Config:
    """Every setting, typed; see docs/configuration.md. Immutable."""

    @property
    def servers(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def part_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def eager_bytes(self) -> int: ...
    @property
    def one_hop_hosts(self) -> int: ...
    @property
    def one_hop_bytes(self) -> int: ...
    @property
    def local_part_bytes(self) -> int: ...
    @property
    def fusion_bytes(self) -> int: ...
    @property
    def fusion_cycle_ms(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def failover(self) -> Literal["auto", "on", "off"]: ...
    @property
    def checksum(self) -> Literal["on", "off"]: ...
    @property
    def check_finite(self) -> Literal["on", "off"]: ...
    @property
    def intra_node(self) -> Literal["auto", "on", "off"]: ...
    @property
    def backup_workers(self) -> int: ...
    @property
    def backup_grace_s(self) -> float: ...
    @property
    def backup_bytes(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def join_timeout_s(self) -> float: ...
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def dead_after_s(self) -> float: ...
    @property
    def lane_threads(self) -> Literal["auto", "on", "off"]: ...
    @property
    def deadlock_after_s(self) -> float: ...
    @property
    def stall_warning_s(self) -> float: ...
    @property
    def cuda(self) -> Literal["auto", "on", "off"]: ...
    @property
    def on_host(self) -> Literal["host", "device", "auto", "nccl"]: ...
    @property
    def device_memory_bytes(self) -> int: ...
    @property
    def device_blocks(self) -> int: ...
    @property
    def nccl(self) -> str: ...
    @property
    def gpudirect(self) -> Literal["auto", "on", "off"]: ...
    @property
    def tensorflow_stream(self) -> Literal["auto", "on", "off"]: ...
    @property
    def spin_us(self) -> int: ...
    @property
    def slice_us(self) -> int: ...
    @property
    def tcp_congestion(self) -> str: ...
    @property
    def libfabric(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def interface(self) -> str: ...
    @property
    def simd(self) -> str: ...
    @property
    def secret(self) -> str: ...
    @property
    def hub(self) -> str: ...
    @property
    def elastic(self) -> Literal["on", "off"]: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def journal_bytes(self) -> int: ...
    @property
    def log_level(self) -> Literal["error", "warning", "info", "debug"]: ...
    @property
    def origins(self) -> list[tuple[str, str, str]]:
        """(name, value, source) in table order; a secret reads "(set)"."""
    @property
    def ignored(self) -> list[str]:
        """Names of variables that Kubernetes set for a service whose name begins with herring."""
    def with_secret(self, secret: str) -> Config: ...

def read_config(overrides: Mapping[str, str] = ...) -> Config:
    """This process's HERRING_* variables; `overrides` (same names) win over them."""

def config_table() -> list[ConfigRow]: ...

class GpuFacts(TypedDict):
    number: int
    name: str
    pci_bus_id: str
    memory_bytes: int
    capability: str
    multiprocessors: int
    copy_engines: int
    peers: list[int]

class CudaSurvey(TypedDict):
    problem: str
    library: str
    version: str
    gpus: list[GpuFacts]

def check_name(name: object) -> None:
    """Raises InvalidArgumentError where this is no name of an operation; None is one."""

def survey_cuda(library: str = ...) -> CudaSurvey: ...
def find_nccl(library: str) -> str: ...
def probe_fabric(config: Config, search: Sequence[str] = ...) -> FabricReport: ...
def job_needs(config: Config, *, workers: int, hosts: int, servers: int, server_hosts: int) -> JobNeeds:
    """Raises InvalidArgumentError for a job that cannot be, or is too large."""

def host_identity() -> str:
    """Equal on processes that can share memory."""

@final
class Member:
    @property
    def role(self) -> Literal["worker", "server"]: ...
    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def host_identity(self) -> str: ...
    @property
    def host_name(self) -> str: ...

@final
class Hub:
    """The control plane's meeting place; runs on a thread of its own until close()."""

    def __init__(
        self,
        *,
        listen_host: str,
        ports: Sequence[int],
        workers: int,
        job_id: int,
        config: Config,
        meet_host: str = "",
        master_port: int = 0,
        doubt_for: float = 0.0,
        start_delay: float = 0.0,
        launch: str = "",
    ) -> None: ...
    @property
    def port(self) -> int: ...
    def counters(self) -> dict[str, int]:
        """Connections so far: accepted, joined, lost; and strangers: bad_strangers, slow_strangers, ..."""

    def close(self) -> None:
        """Waits up to a second for members that are leaving, then stops."""

@final
class HubClient:
    """This process's connection to the hub. The constructor waits until everybody has joined."""

    def __init__(
        self,
        *,
        host: str,
        ports: Sequence[int],
        role: Literal["worker", "server"],
        rank: int,
        workers: int,
        config: Config,
        timeout: float,
        master_port: int = 0,
        launch: str = "",
    ) -> None: ...
    @property
    def job_id(self) -> int: ...
    @property
    def workers(self) -> list[Member]: ...
    @property
    def servers(self) -> list[Member]: ...
    def exchange(self, name: str, blob: bytes, timeout: float) -> list[bytes]:
        """All-gather of one blob a member: workers' by rank, then servers'."""
    def report_failure(self, reason: str) -> None: ...
    def leave(self) -> None: ...

@final
class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: float, *, blocks: bool = False) -> bool:
        """Blocks up to `timeout` seconds; False where it is not done by then (it goes on).

        `blocks`: that is longer than the operation can take, so the thread does nothing else before it has ended. Ranks
        that wait for each other so are found out.
        """
    def finish(self) -> bool:
        """Whether it has ended; raises why it failed where that is so. Never blocks."""
    def check(self) -> None:
        """Raises why a finished operation failed."""
    def on_done(self, callback: Callable[[], object]) -> None:
        """Calls it once when the operation has ended, well or not, on a thread of the runtime that may block."""
    @property
    def source(self) -> int:
        """Of a receive that has ended well: the group rank that sent the message."""
    @property
    def contributors(self) -> list[int]:
        """Of a reduction with backup workers that has ended well: the group ranks that are in it. Empty: all."""

@final
class TensorReader:
    """Reads tensors of exactly these classes, by the functions that those export for DLPack 1.3. Raises TypeError where
    they export none. `veto`: their method that says that a tensor's memory is not all of it."""

    def __init__(self, classes: tuple[type, ...], veto: str) -> None: ...

@final
class Fusion:
    """Small reductions by name of one group; docs/adr/0015-fusion-rounds.md. Every rank of the group makes one."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        group: int,
        ranks: Sequence[int],
        index: int,
        bucket_bytes: int,
        tensor_bytes: int,
        cycle: float,
        timeout: float,
        series: int,
        checks_finite: bool,
        go_alone: Callable[[int, Any, Any, str, int, float, float], object],
    ) -> None:
        """go_alone(ticket, tensor, output, name, op, prescale, postscale): that one travels by itself."""
    def submit(
        self,
        name: str,
        source: int,
        result: int,
        dtype: int,
        op: int,
        shape: tuple[int, ...],
        prescale: float,
        postscale: float,
        tensor: Any,
        output: Any,
        /,
    ) -> int:
        """Starts a reduction of memory at these addresses, which `tensor` and `output` hold; its ticket, from 1 << 60
        on. 0: it has to go alone, now. Raises InvalidArgumentError where the name or the memory is in use."""
    def submit_tensor(
        self, reader: TensorReader, tensor: Any, output: Any, name: str, op: int, prescale: float, postscale: float, /
    ) -> int | None:
        """submit() with what the reader finds; None where it cannot read them, or they differ."""
    def place(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[Memory, list[int]]:
        """Memory for tensors by name, of so many bytes, which are reduced there in place; where each begins. Raises
        InvalidArgumentError where a name comes twice."""
    def counters(self) -> tuple[int, int]:
        """Buckets so far, and how many of them were the tensors' own memory."""
    def __contains__(self, ticket: int) -> bool:
        """Whether somebody has to finish it yet."""
    def in_flight(self) -> list[tuple[int, str]]:
        """Such tickets and their names."""
    def has_pending(self, name: str) -> bool:
        """Whether a tensor of this name has neither ended nor gone alone: also while go_alone is called for it."""
    def poll(self, ticket: int) -> bool:
        """Whether it has ended or gone alone. Its name is free then."""
    def wait(self, ticket: int, timeout: float) -> bool | None:
        """True: it has ended. False: it went alone. None: not after `timeout` seconds."""
    def finish(self, ticket: int, timeout: float, /) -> Any:
        """wait(), then it is forgotten: its output. False: it went alone. None: it is not in flight. Raises how it
        ended, where not well; then drop() it."""
    def ended_well(self, tickets: Sequence[int]) -> list[bool]:
        """Which of them have ended with their sum in place, and are in flight: for who is not their owner."""
    def drop(self, ticket: int) -> str | None:
        """Forgets one that has failed; its name."""
    def on_end(self, ticket: int, callback: Callable[[bool], object]) -> None:
        """Calls it when it has ended here, with what finish() would return."""
    def went_outside(self, name: str) -> None: ...
    def came_back(self, name: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self, timeout: float, leaves_job: bool) -> None: ...

@final
class Arrays:
    """A list of arrays, contiguous and in CPU memory (buffer protocol or DLPack), held as long as this."""

    def __init__(self, arrays: Sequence[Any], writable: bool = False) -> None: ...
    def __len__(self) -> int: ...
    def parts(self, most_bytes: int) -> list[list[int]]:
        """Which travel together, by their places: those of one dtype up to so many bytes. The same for equal lists."""
    def digest(self) -> int:
        """Of their number, dtypes and shapes."""
    def are_all_above(self, bytes: int) -> bool: ...  # noqa: A002
    def elements(self, part: list[int]) -> int:
        """How many those have together."""
    def pack(self, part: list[int], memory: Any) -> None:
        """Copies them one after the other into the memory."""
    def unpack(self, part: list[int], memory: Any) -> None:
        """Copies them back."""

@final
class DeviceArray:
    """An array in a GPU's memory, by DLPack, and copies of it. They come after what its library has submitted."""

    def __init__(self, array: Any, is_written: bool, role: str) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    def start_to_host(self, host: Buffer) -> None:
        """`host`: contiguous memory of so many bytes; kept until the copy ends."""
    def start_to_device(self, host: Buffer) -> None: ...
    def has_ended(self) -> bool:
        """Whether the copies have ended. Raises what went wrong."""
    def wait(self, seconds: float) -> bool:
        """The same after so many seconds at most."""

class Memory(Buffer):
    """Shared, registered memory of the runtime: writable bytes, alive as long as something refers to it."""

    def __len__(self) -> int: ...

class Started:
    """A Work of Runtime.start(), with what its handle knows: a base for that."""

    _result: Any
    _name: str | None
    _ranks: Sequence[int]
    _timeout: float
    _begun: float
    @property
    def _contributors(self) -> list[int]: ...
    def _finish(self) -> bool:
        """As Work.finish()."""
    def _is_done(self) -> bool: ...
    def _wait(self, timeout: float, blocks: bool, /) -> bool:
        """As Work.wait()."""

StartedT = TypeVar("StartedT", bound=Started)

class Runtime:
    """A worker's runtime. Every worker and server of the job constructs its own at the same time."""

    def __init__(
        self, *, config: Config, hub: HubClient, rank: int, fabric_search: Sequence[str], timeout: float
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def servers(self) -> int: ...
    def description(self) -> str: ...
    def add_group(self, group: int, ranks: Sequence[int], may_travel: bool = False) -> None:
        """`may_travel`: its small reductions by name may travel together, as those of group 0 do."""
    def remove_group(self, group: int) -> None: ...
    def submit(
        self,
        collective: Literal["all_reduce", "broadcast", "all_gather", "barrier"],
        input: Any = None,  # noqa: A002
        output: Any = None,
        *,
        op: str = "sum",
        root: int = 0,
        group: int = 0,
        name: str | None = None,
        timeout: float | None = None,
        is_waited_for: bool = False,
        backup: bool = False,
        digest: int = 0,
        may_travel: bool = False,
    ) -> Work:
        """Starts an operation on contiguous CPU memory (buffer protocol or DLPack). No input: in place.

        is_waited_for: wait() is called at once; the calling thread then moves the data itself.
        digest: Of something else that all ranks must agree about.
        may_travel: The name is the program's own: a small all_reduce may travel with others.
        """

    def run(
        self,
        collective: Literal["all_reduce", "broadcast", "all_gather", "barrier"],
        input: Any,  # noqa: A002
        output: Any,
        op: str,
        root: int,
        name: str | None,
        timeout: float | None,
        backup: bool,
        /,
    ) -> None:
        """submit() and wait in one, among all ranks; the calling thread moves the data itself. Raises what it failed
        with."""

    def start(
        self,
        handle_type: type[StartedT],
        input: Any,  # noqa: A002
        output: Any,
        op: str,
        name: str,
        group: int,
        ranks: Sequence[int],
        timeout: float,
        /,
    ) -> StartedT:
        """submit() of an all_reduce that may travel with others."""

    def send(self, data: Any, *, to: int, tag: int, group: int = 0, timeout: float | None = None) -> Work:
        """A message to a group rank; done when that rank has received it. Tags with the top bit (1 << 63) set are met
        by receives of that very tag alone."""
    def receive(
        self, memory: Any, *, source: int | None = None, tag: int, group: int = 0, timeout: float | None = None
    ) -> Work:
        """Meets a message of the same group, tag, dtype and size. No source: from any rank."""

    def allocate(self, bytes: int) -> Memory | None:  # noqa: A002
        """Memory that operations use without a copy; None where there is none left."""
    def pinned(self, bytes: int, array: DeviceArray) -> tuple[Memory | None, str]:  # noqa: A002
        """The same for copies of an array on a GPU; and once, why there is none where the system refuses it."""
    def place(self, group: int, names: Sequence[str], sizes: Sequence[int]) -> tuple[Memory, list[int]]:
        """As Fusion.place(), for start() and submit(may_travel=True) in this group."""
    def abort(self, reason: str) -> None: ...
    def shutdown(self) -> None: ...
    def stats(self) -> RuntimeStats: ...
    def server_counters(self) -> list[ServerCounters]: ...
    def stragglers(self) -> list[Straggler]: ...
    def capsule(self) -> CapsuleType:
        """ "herring.runtime": a heap std::shared_ptr<herring::runtime::Communicator>*, for other extensions."""

@final
class RowExchange:
    """Rows of arrays, of which ranks have different numbers, between all ranks (csrc/collectives/row_exchange.h)."""

    def __init__(
        self,
        arrays: Sequence[Any],
        splits: Sequence[int] | None,
        *,
        group: int,
        ranks: Sequence[int],
        index: int,
        name: str,
        use: int,
        timeout: float | None,
    ) -> None: ...
    def tell(self, runtime: Runtime) -> Work:
        """The first step: each rank tells all others how many it has."""
    def counts(self, number: int = 0) -> list[int]:
        """After it: how many rows of array `number` come from each rank. Raises MismatchError, on all ranks."""
    def move(self, runtime: Runtime, number: int, output: Any) -> list[Work]:
        """The second step: all these rows into `output`."""

def checked_splits(splits: Sequence[int] | None, rows: int, size: int) -> list[int]:
    """How many rows go to each rank; None: equally many. Raises InvalidArgumentError."""

def check_dims(dims: int) -> None:
    """Raises InvalidArgumentError for more dimensions than RowExchange takes."""

def rows_of(rows: int, size: int, index: int) -> tuple[int, int]:
    """The first row of member `index` where all share them, and the one after its last."""

def message_tag(name: str, use: int) -> int:
    """Another one for each use of the name."""

@final
class ServerProcess:
    """A server of its own. Construct it while the workers construct their runtimes."""

    def __init__(
        self, *, config: Config, hub: HubClient, rank: int, fabric_search: Sequence[str], timeout: float
    ) -> None: ...
    def run(self) -> None:
        """Serves until all workers have left or stop(); raises where the job failed. Signal handlers run meanwhile."""
    def stop(self) -> None: ...
    def counters(self) -> ServerProcessCounters: ...
    def close(self) -> None: ...

@final
class ElasticRuntime(Runtime):
    """A worker of a job that may lose and gain processes (csrc/elastic/elastic_runtime.h)."""

    def __init__(
        self,
        *,
        config: Config,
        host: str,
        port: int,
        rank: int,
        fabric_search: Sequence[str],
        timeout: float,
        workers: int = 0,
    ) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def job_id(self) -> int: ...
    @property
    def workers(self) -> list[Member]: ...
    @property
    def server_processes(self) -> list[Member]: ...
    @property
    def waiting(self) -> int: ...
    def let_in(self, timeout: float) -> bool: ...
    def start_again(self, timeout: float) -> None: ...
    def on_change(self, callback: Callable[[int, int, int, int, int, str], object]) -> None: ...

@final
class ElasticServer:
    """A server process of such a job."""

    def __init__(
        self, *, config: Config, host: str, port: int, rank: int, fabric_search: Sequence[str], timeout: float
    ) -> None: ...
    def run(self) -> None: ...
    def stop(self) -> None: ...
    def counters(self) -> ServerProcessCounters: ...
    def close(self) -> None: ...

@final
class Rendezvous:
    """Puts such a job together (csrc/elastic/rendezvous_server.h)."""

    def __init__(
        self, *, config: Config, listen_host: str, port: int, workers: int, servers: int, min_workers: int
    ) -> None: ...
    @property
    def port(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def wait(self) -> bool: ...
    def close(self) -> None: ...
