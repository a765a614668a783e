"""An optimizer's gradients in buckets: what ranks agree on, on ranks that are alike and on ranks that are not."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
import torch
from horovod_job import cases_of, check, launch

from herring.horovod.common.exceptions import HorovodInternalError
from herring.horovod.torch import _operations
from herring.horovod.torch._buckets import Answer, Bucket, Kind, answer_of, kind_of, say


@pytest.mark.parametrize("case", cases_of("cases_horovod_buckets"))
def test_on_three_ranks(case: str) -> None:
    check("cases_horovod_buckets", 3, case)


@pytest.mark.parametrize("case", cases_of("cases_horovod_replaced"))
def test_what_scripts_do_on_three_ranks(case: str) -> None:
    check("cases_horovod_replaced", 3, case)


def test_without_fusion_each_gradient_is_a_bucket() -> None:
    settings = (("HERRING_FUSION_BYTES", "0"),)
    check("cases_horovod_buckets", 3, "case_bits_are_those_of_each_gradient_by_name", settings, alone=True)


def test_a_bucket_that_an_error_left_half_full_is_an_error() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    kinds = [kind_of(each, str(index), each.dtype) for index, each in enumerate(parameters)]
    started: list[str] = []
    bucket = Bucket(parameters, kinds, lambda _, name: started.append(name))
    with pytest.MonkeyPatch.context() as memory:  # There is no job.
        memory.setattr(_operations, "memory_for", lambda size, dtype, _: torch.empty(size, dtype=dtype))
        bucket.put(bucket.places[0])
        for _ in range(2):
            with pytest.raises(HorovodInternalError, match="0 and 1 more"):
                bucket.finish(lambda *_: None)
        bucket.drop()
        for place in bucket.places:
            bucket.put(place)
    assert started == ["0 and 1 more"]


STEPS = """
import os, torch
import herring
import herring.horovod.torch as hvd
{before}
hvd.init()
parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((400, 400), (9,), (300, 300), (5,))]
names = [("grad.%d" % i, each) for i, each in enumerate(parameters)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names, op=hvd.Sum)
for step in range(6):
    optimizer.zero_grad()
    before = herring.stats()["ops_completed"]
    sum((each * (hvd.rank() + step)).sum() for each in parameters).backward()
    {after}
    optimizer.synchronize()
    assert all(each.grad.unique().tolist() == [2 * step + 1] for each in parameters), step
hvd.shutdown()
print("well", flush=True)
"""


def _launch(tmp_path: Path, before: str = "", after: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    return launch(tmp_path, STEPS.format(before=before, after=after), **settings)


@pytest.mark.parametrize("index", [0, 1])
def test_a_nan_is_blamed_on_its_gradient_and_rank(tmp_path: Path, index: int) -> None:
    """Of a large gradient, and of one that travels with others; in a step in which there would be buckets."""
    after = f"""
    if step == 3 and hvd.rank() == 1:
        optimizer._gradients.reset()
    if step == 3:
        optimizer._gradients.reset()
        if hvd.rank() == 1:
            parameters[{index}].grad.view(-1)[3] = float("nan")
        try:
            optimizer.synchronize()
            raise SystemExit("no error")
        except hvd.HorovodInternalError as error:
            assert "grad.{index}" in str(error) and "rank 1" in str(error), error
        print("well", flush=True)
        os._exit(0)
"""
    done = _launch(tmp_path, after=after, HERRING_CHECK_FINITE="on")
    assert done.stdout.count("well") == 2, done.stdout + done.stderr


def test_ranks_with_other_bucket_sizes_have_those_of_rank_0(tmp_path: Path) -> None:
    before = 'os.environ["HERRING_FUSION_BYTES"] = str((1 << 24) if os.environ["RANK"] == "0" else 5000)'
    done = _launch(tmp_path, before)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    after = """
    if step == 3 and hvd.rank() == 1:
        os._exit(9)
"""
    done = _launch(tmp_path, after=after)
    assert done.returncode != 0
    assert "HorovodInternalError" in done.stderr
    assert "rank 1" in done.stderr


class Ranks:
    """What several ranks agree on."""

    def __init__(self, kinds: list[list[Kind]], fitting: list[list[bool]], came: list[list[int]]) -> None:
        self.kinds = kinds
        self.inputs = list(zip(kinds, fitting, came, strict=True))

    def buckets(self, bucket_bytes: int, joined: int = 0) -> Answer | None:
        """So many others have joined."""
        said = [say(*each, 0 if index else bucket_bytes) for index, each in enumerate(self.inputs)]
        total = [sum(numbers) for numbers in zip(*said, strict=True)]
        told = [answer_of(total, kinds, len(said) + joined) for kinds in self.kinds]
        assert all(each == told[0] for each in told), "ranks see different buckets"
        return told[0]


def _kinds(count: int, seed: int) -> list[Kind]:
    chosen = random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16)
    return [Kind(f"p.{i}", (chosen.randrange(1, 5000),), (1,), chosen.choice(dtypes)) for i in range(count)]


@pytest.mark.parametrize("seed", range(200))
def test_all_ranks_have_the_same_buckets(seed: int) -> None:
    chosen = random.Random(seed)
    ranks, count, most = chosen.randrange(1, 6), chosen.randrange(1, 40), chosen.choice((0, 4096, 1 << 20))
    kinds = _kinds(count, seed)
    fitting = [[chosen.random() < 0.95 for _ in kinds] for _ in range(ranks)]
    came = [chosen.sample(range(count), count) for _ in range(ranks)]
    answer = Ranks([kinds] * ranks, fitting, came).buckets(most)
    assert answer is not None
    buckets = answer.buckets
    everywhere = [index for index in range(count) if all(each[index] for each in fitting)]
    assert sorted(index for bucket in buckets for index in bucket) == everywhere
    for bucket in buckets:
        assert len({kinds[index].dtype for index in bucket}) == 1
        size = sum(kinds[index].count * kinds[index].dtype.itemsize for index in bucket)
        assert size <= most or len(bucket) == 1
        mean = [sum(each[index] for each in came) for index in bucket]
        assert mean == sorted(mean), "not in the order in which they come"


@pytest.mark.parametrize("seed", range(50))
def test_ranks_that_differ_have_none(seed: int) -> None:
    chosen = random.Random(seed)
    ranks, count = chosen.randrange(2, 6), chosen.randrange(1, 20)
    kinds = [_kinds(count, seed) for _ in range(ranks)]
    odd, index = chosen.randrange(ranks), chosen.randrange(count)
    one = kinds[odd][index]
    kinds[odd][index] = chosen.choice(
        (Kind(one.name + "x", one.shape, one.stride, one.dtype), Kind(one.name, (1, *one.shape), (9, 1), one.dtype))
    )
    assert Ranks(kinds, [[True] * count] * ranks, [list(range(count))] * ranks).buckets(1 << 20) == Answer(
        [], is_one_list=False
    )


def test_where_a_rank_has_joined_nothing_is_agreed() -> None:
    kinds = _kinds(5, 1)
    ranks = Ranks([kinds] * 2, [[True] * 5] * 2, [list(range(5))] * 2)
    assert ranks.buckets(1 << 20, joined=1) is None
    assert ranks.buckets(1 << 20) is not None


def test_hashes_of_many_ranks_fit_an_int64() -> None:
    said = say(_kinds(3, 2), [True] * 3, [0, 1, 2], 1 << 30)
    assert all(abs(number) * (1 << 15) < 1 << 63 for number in said)
