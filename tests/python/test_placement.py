"""Rank and size come from whatever launched the process; a half-set launcher is an error, not a job of one."""

import pytest

from herring import InvalidArgumentError
from herring._placement import find_placement, launch_id


def test_torchrun_variables():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = find_placement(environment=env)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert not place.is_mpi


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (2, 4, 0, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, None, None)),
    ],
)
def test_mpi_variables(env, expected):
    place = find_placement(environment=env)
    assert (place.rank, place.size, place.local_rank, place.local_size) == expected
    assert place.is_mpi


def test_torchrun_under_mpi_wins_but_mpi_may_carry_the_bootstrap():
    env = {"RANK": "1", "WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    place = find_placement(environment=env)
    assert (place.rank, place.size, place.is_mpi) == (1, 3, True)


def test_no_launcher_is_a_job_of_one():
    place = find_placement(environment={})
    assert (place.rank, place.size, place.local_rank, place.local_size) == (0, 1, 0, 1)


def test_arguments_win():
    place = find_placement(1, 2, {"RANK": "0", "WORLD_SIZE": "9"})
    assert (place.rank, place.size) == (1, 2)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is 'two'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank is 4 of 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "from 0 to 3"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "size is 0"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_bad_values_are_named(env, names):
    with pytest.raises(InvalidArgumentError, match=names):
        find_placement(environment=env)


def test_half_of_the_arguments_is_an_error():
    with pytest.raises(InvalidArgumentError, match="give both"):
        find_placement(rank=1, environment={})


MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-7@1"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({**BY_HAND, "TORCHELASTIC_RUN_ID": "train"}, "TORCHELASTIC_RUN_ID=train"),
        ({**BY_HAND, "TORCHELASTIC_RUN_ID": "none"}, ""),
        ({**BY_HAND, "SLURM_JOB_ID": "12"}, "SLURM_JOB_ID=12"),
        ({**BY_HAND, "SLURM_JOB_ID": "13", "SLURM_HET_JOB_ID": "12"}, "SLURM_JOB_ID=12"),
        ({**MPI, "SLURM_JOB_ID": "12"}, "PMIX_NAMESPACE=prterun-a-7@1\nSLURM_JOB_ID=12"),
        # Each rank in an srun of its own: one job, several namespaces.
        ({**BY_HAND, "PMIX_NAMESPACE": "slurm.pmix.12.3", "SLURM_JOB_ID": "12"}, "SLURM_JOB_ID=12"),
        (BY_HAND, ""),
    ],
)
def test_what_the_launcher_calls_its_job(env, expected):
    assert launch_id(find_placement(environment=env), env) == expected
