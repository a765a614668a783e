"""What happens in a round of chaos.py: a pure function of the seed and of what the machine allows."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

# What ends a process or its link for good, and what passes: of that nobody may die. "half": packets of one host to one
# other vanish, and nothing else does; once all are connected.
LASTING = ("kill", "stop", "cut", "half")
PASSING = ("pause", "flap")
PHASES = ("start", "connect", "step", "shutdown")
# A pause or a cut link that lasts this part of dead_after must be survived. (TCP repeats after 0.2, 0.6, 1.4, 3.0 s.)
PASSING_SHARE = 0.25
LAUNCHER = -1
TWIN_SHARE = 0.1  # Of the rounds that no launcher starts.
GROUP_SHARE = 0.08  # Of those, too: a group of some ranks is given up.
NAMES_SHARE, LATE_SHARE, STRICT_SHARE, FABRIC_SHARE = 0.25, 0.3, 0.2, 0.25


@dataclass(frozen=True)
class Strike:
    """`kind` befalls process `target` (workers count first, then servers; LAUNCHER: herringrun) in `phase`.

    half: packets from the host of `target` to that of `other` vanish.
    """

    kind: str
    target: int
    phase: str
    step: int
    delay_s: float
    other: int = -1


@dataclass(frozen=True)
class GroupEnd:
    """`culprit` gives up the group of `members` in `step`, by "abort" or "destroy", while the others use it."""

    members: tuple[int, ...]
    culprit: int
    how: str
    step: int


@dataclass(frozen=True)
class Plan:
    """One round. `hosts[i]` is the host of process i; `launcher`: herringrun starts them, all on one host."""

    name: str
    workers: int
    servers: int
    hosts: tuple[int, ...]
    launcher: bool
    intra_node: str
    dead_after_s: float
    heartbeat_s: float
    join_timeout_s: float
    steps: int
    sizes: tuple[int, ...]
    strikes: tuple[Strike, ...]
    resume: bool  # A stopped process goes on once the others have ended: it must end by itself too.
    again: bool  # The same job starts once more on the same ports at once, and must succeed.
    mode: str = "plain"  # Or "restart": herringrun --restart-servers; "elastic": and --elastic.
    checksum: bool = False
    # Another job of the same shape, with the same port and no secret, starts at the same time: in which order (job,
    # process). Empty: there is none.
    twin: tuple[tuple[int, int], ...] = ()
    group_end: GroupEnd | None = None
    # What the workers' script does besides (chaos_deeds.py).
    deeds: tuple[str, ...] = ()
    strict: bool = False  # All endpoints want memory registered (chaos_strict.cc).
    provider: str = "auto"

    def processes(self) -> int:
        return self.workers + self.servers

    def name_of(self, process: int) -> str:
        """As Herring's errors name it."""
        if process == LAUNCHER:
            return "launcher"
        return f"worker {process}" if process < self.workers else f"server {process - self.workers}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        hosts = len(set(self.hosts))
        strikes = " and ".join(
            f"{s.kind} {self.name_of(s.target)}{f' to {self.name_of(s.other)}' if s.kind == 'half' else ''}"
            f" in {s.phase}{f' {s.step}' if s.phase == 'step' else ''}"
            for s in self.strikes
        )
        strikes += "a second job on its port" if self.twin else ""
        if self.group_end is not None:
            strikes += f"{self.group_end.how} by worker {self.group_end.culprit} of a group of {self.group_end.members}"
        place = "herringrun" if self.launcher else f"{hosts} host{'s' if hosts > 1 else ''}"
        place += {"plain": "", "restart": " --restart-servers", "elastic": " --elastic"}[self.mode]
        place += " with checksums" if self.checksum else ""
        place += " on strict endpoints" if self.strict else ""
        place += f" over {self.provider}" if self.provider != "auto" else ""
        place += "".join({"names": ", names twice", "late": ", late calls"}[deed] for deed in self.deeds)
        return f"{self.workers}+{self.servers} on {place}, dead after {self.dead_after_s:g} s: {strikes}"


def make_plan(seed: int, number: int, max_hosts: int, dead_after_s: tuple[float, ...]) -> Plan:
    """Round `number` of a run: the same on every machine with as many hosts (0: plain processes, nothing to cut)."""
    dice = random.Random(f"herring chaos {seed} {number}")
    plan = _befallen(dice, f"{seed}/{number}", max_hosts, dead_after_s)
    names, late = dice.random() < NAMES_SHARE, dice.random() < LATE_SHARE
    strict, fabric = dice.random() < STRICT_SHARE, dice.random() < FABRIC_SHARE
    deeds = tuple(deed for deed, is_chosen in (("names", names), ("late", late)) if is_chosen)
    return replace(
        plan,
        deeds=() if plan.twin or plan.group_end else deeds,
        strict=strict and not plan.twin,
        provider="tcp" if fabric and not plan.twin else "auto",
    )


def _befallen(dice: random.Random, name: str, max_hosts: int, dead_after_s: tuple[float, ...]) -> Plan:
    """Who is there, and what befalls them."""
    workers = dice.randint(2, 4)
    servers = dice.choice((0, 0, 1, 2))
    hosts = _places(dice, workers, servers, max_hosts)
    launcher = len(set(hosts)) == 1 and dice.random() < 0.3
    dead_after = dice.choice(dead_after_s)
    phase = dice.choices(PHASES, (2, 3, 6, 3))[0]
    steps = dice.randint(60, 120)  # Far more than there is time for before the strike lands.
    strikes = [_strike(dice, workers, servers, hosts, launcher, phase, steps, max_hosts)]
    if strikes[0].kind in LASTING and not launcher and dice.random() < 0.25:
        second = _strike(dice, workers, servers, hosts, False, phase, steps, max_hosts)
        if second.kind in LASTING and second.target != strikes[0].target:
            strikes.append(replace(second, delay_s=dice.random()))
    plan = Plan(
        name=name,
        workers=workers,
        servers=servers,
        hosts=hosts,
        launcher=launcher,
        intra_node=dice.choice(("auto", "auto", "off")),
        dead_after_s=dead_after,
        heartbeat_s=min(1.0, dead_after / 5),
        join_timeout_s=dead_after + 6,
        steps=steps,
        sizes=tuple(dice.choice((1, 1000, 20_000, 300_000)) for _ in range(dice.randint(1, 3))),
        strikes=tuple(strikes),
        resume=dice.random() < 0.5,
        again=dice.random() < 0.2,
    )
    if not launcher and dice.random() < TWIN_SHARE:
        return _with_twin(dice, plan)
    if not launcher and dice.random() < GROUP_SHARE:
        return _with_group(dice, plan)
    # What befalls links stays as it is.
    is_spread = len(set(hosts)) > 1
    mode = "plain" if is_spread else dice.choices(("plain", "restart", "elastic"), (2, 4, 4))[0]
    checksum = dice.random() < 0.3
    return replace(plan if mode == "plain" else _with_rendezvous(dice, plan, mode), checksum=checksum)


def _with_rendezvous(dice: random.Random, plan: Plan, mode: str) -> Plan:
    """The same in a job whose servers come back, or whose workers may die: under herringrun, on one host."""
    elastic = mode == "elastic"
    workers = max(plan.workers, 3) if elastic else plan.workers
    servers = dice.choice((0, 0, 2, 3)) if elastic else dice.choice((2, 2, 3))
    hosts = (0,) * (workers + servers)
    # Before an elastic job has begun it waits for who does not come as any job does.
    phase = dice.choices(("step", "shutdown"), (4, 1))[0] if elastic else dice.choices(PHASES, (1, 1, 6, 1))[0]
    strikes = [_strike(dice, workers, servers, hosts, dice.random() < 0.2, phase, plan.steps, 0)]
    if servers and dice.random() < 0.5:  # Most of what is new here is about servers.
        strikes = [replace(strikes[0], kind="kill", target=workers + dice.randrange(servers))]
    if strikes[0].kind in LASTING and strikes[0].target != LAUNCHER and dice.random() < 0.4:
        second = _strike(dice, workers, servers, hosts, False, phase, plan.steps, 0)
        if second.kind in LASTING and second.target != strikes[0].target:
            strikes.append(replace(second, delay_s=dice.random()))
    return replace(
        plan,
        mode=mode,
        workers=workers,
        servers=servers,
        hosts=hosts,
        launcher=True,
        strikes=tuple(strikes),
        again=False,
    )


def _with_twin(dice: random.Random, plan: Plan) -> Plan:
    """Two such jobs on one host, their processes mixed. The workers 0 are first: nobody else has anything to join."""
    processes = [(job, index) for job in range(2) for index in range(plan.processes())]
    dice.shuffle(processes)
    processes.sort(key=lambda process: process[1] != 0)
    return replace(
        plan, hosts=(0,) * plan.processes(), strikes=(), resume=False, again=False, steps=20, twin=tuple(processes)
    )


def _with_group(dice: random.Random, plan: Plan) -> Plan:
    """Nothing befalls this job but what one of its ranks does to a group."""
    members = tuple(dice.sample(range(plan.workers), dice.randint(2, plan.workers)))
    how, steps = dice.choice(("abort", "destroy")), 30
    end = GroupEnd(members, dice.choice(members), how, dice.randrange(steps // 2))
    join_timeout_s = 60.0  # Servers wait for workers, who import torch, some of them at the same time.
    unharmed = replace(plan, strikes=(), resume=False, again=False, steps=steps, join_timeout_s=join_timeout_s)
    return replace(unharmed, group_end=end)


def _places(dice: random.Random, workers: int, servers: int, max_hosts: int) -> tuple[int, ...]:
    style = dice.choice(("one", "one", "pairs", "spread", "spread")) if max_hosts > 1 else "one"
    if style == "one":
        return (0,) * (workers + servers)
    per_host = 2 if style == "pairs" else 1
    places = [rank // per_host for rank in range(workers)]
    # Servers on hosts of their own where there are enough, else beside the workers.
    first = places[-1] + 1
    places += [first + i if first + i < max_hosts else i for i in range(servers)]
    return tuple(place % max_hosts for place in places)


def _strike(
    dice: random.Random,
    workers: int,
    servers: int,
    hosts: tuple[int, ...],
    launcher: bool,
    phase: str,
    steps: int,
    max_hosts: int,
) -> Strike:
    target = dice.randrange(workers + servers)
    kinds = {"kill": 4, "stop": 3, "pause": 1}
    if max_hosts > 1 and len(set(hosts)) > 1:
        kinds.update(cut=4)
        if phase in ("step", "shutdown"):  # Who opens its endpoints finds no interface while the link is down.
            kinds.update(flap=1, half=4)
    if launcher and dice.random() < 0.4:
        target, kinds = LAUNCHER, {"kill": 1}
    kind = dice.choices(list(kinds), list(kinds.values()))[0]
    span = {"start": 0.5, "connect": 0.12, "step": 0.01, "shutdown": 0.006}[phase]
    elsewhere = [index for index, host in enumerate(hosts) if target != LAUNCHER and host != hosts[target]]
    other = dice.choice(elsewhere) if kind == "half" else -1
    return Strike(kind, target, phase, dice.randrange(steps // 2), dice.random() * span, other)
