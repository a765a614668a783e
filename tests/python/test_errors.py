"""Exceptions carry the name that users import them by."""

import pickle

import pytest

import herring

KINDS = [getattr(herring, name) for name in herring.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_traceback_shows_the_name_to_import(kind):
    assert f"{kind.__module__}.{kind.__qualname__}" == f"herring.{kind.__name__}"
    assert type(pickle.loads(pickle.dumps(kind("why")))) is kind


def test_none_is_left_out():
    def with_all_below(kind):
        return {kind}.union(*map(with_all_below, kind.__subclasses__()))

    assert set(KINDS) == {kind for kind in with_all_below(herring.HerringError) if kind.__module__ == "herring"}
