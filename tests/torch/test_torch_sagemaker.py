"""SageMaker's names (smdistributed.dataparallel.torch) as herring.torch.distributed and herring.torch.parallel."""

from __future__ import annotations

from ranks import clean_environment, run_children, run_ranks


def test_a_script_with_sagemakers_names() -> None:
    run_ranks(2, "cases_sagemaker:script")


def test_outside_a_job_nothing_is_available() -> None:
    import sys

    code = (
        "import herring.torch.distributed as dist\n"
        "assert not dist.is_available()\n"
        "dist.init_process_group()\n"
        "assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)\n"
        "print('fine')\n"
    )
    assert "fine" in run_children([([sys.executable, "-c", code], clean_environment())], 60)[0]
