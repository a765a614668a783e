"""Training with backup workers: late gradients are left out, and the parameters stay equal on all ranks."""

from __future__ import annotations

from ranks import run_ranks

# A grace for who is only a little late on a busy machine.
BACKUP = {"HERRING_BACKUP_WORKERS": "1", "HERRING_BACKUP_GRACE_S": "0.15", "HERRING_INTERFACE": "lo"}


def test_a_late_rank_holds_nobody_up_and_has_the_same_parameters() -> None:
    run_ranks(3, "cases_backup:late_rank", timeout=180, env=BACKUP)


def test_so_it_is_with_gradients_in_16_bits() -> None:
    run_ranks(3, "cases_backup:late_rank_bfloat16", timeout=180, env=BACKUP)


def test_within_the_grace_all_are_in() -> None:
    run_ranks(3, "cases_backup:nobody_is_late", timeout=180, env={**BACKUP, "HERRING_BACKUP_GRACE_S": "20"})
