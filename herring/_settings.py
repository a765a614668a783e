"""The settings that herring.init() takes, for type checkers and editors. docs/configuration.md says what each means."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict

_OnOff = Literal["off", "on"] | bool
_AutoOnOff = Literal["auto", "on", "off"] | bool


class Settings(TypedDict, total=False):
    """HERRING_* in lower case, without HERRING_. Bytes may have KB, MB or GB: "64KB". None: as if not given."""

    servers: int | str | None
    lanes: int | str | None
    part_bytes: int | str | None
    chunk_bytes: int | str | None
    window: int | str | None
    eager_bytes: int | str | None
    one_hop_hosts: int | str | None
    one_hop_bytes: int | str | None
    local_part_bytes: int | str | None
    fusion_bytes: int | str | None
    fusion_cycle_ms: int | str | None
    arena_bytes: int | str | None
    intra_node: _AutoOnOff | None
    failover: _AutoOnOff | None
    checksum: _OnOff | None
    check_finite: _OnOff | None
    backup_workers: int | str | None
    backup_grace_s: float | str | None
    backup_bytes: int | str | None
    timeout_s: float | str | None
    join_timeout_s: float | str | None
    heartbeat_s: float | str | None
    dead_after_s: float | str | None
    deadlock_after_s: float | str | None
    stall_warning_s: float | str | None
    spin_us: int | str | None
    slice_us: int | str | None
    tcp_congestion: str | None
    libfabric: str | None
    lane_threads: _AutoOnOff | None
    cuda: _AutoOnOff | None
    on_host: Literal["host", "device", "auto", "nccl"] | None
    device_memory_bytes: int | str | None
    device_blocks: int | str | None
    nccl: str | None
    gpudirect: _AutoOnOff | None
    tensorflow_stream: _AutoOnOff | None
    provider: Literal["auto", "efa", "verbs", "tcp", "builtin"] | None
    interface: str | None
    simd: Literal["auto", "avx512", "avx2", "neon", "scalar"] | None
    secret: str | None
    hub: str | None
    elastic: _OnOff | None
    rendezvous: str | None
    journal_bytes: int | str | None
    log: Literal["error", "warning", "info", "debug"] | None


class InitOptions(Settings, total=False):
    """All that herring.init() takes."""

    rank: int | None
    size: int | None
    timeout: float | timedelta | None
