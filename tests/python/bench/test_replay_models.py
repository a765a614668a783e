"""The replayed gradients are those of the published models, in backward's order and DDP's buckets."""

from __future__ import annotations

import itertools

import pytest
from surroundings import is_installed

import herring
from herring.bench._models import MODELS, T5_RANKS, Layer, Model, bert_large, maskrcnn, resnet50, t5_3b
from herring.bench._replay_schedule import Bucket, Gradient, backward_for, buckets, expected_step, gradients

MB = 1 << 20
needs_torch = pytest.mark.skipif(not is_installed("torch"), reason="needs torch")


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (resnet50(), 25_557_032),  # torchvision's resnet50
        (bert_large(), 336_226_108),  # the published checkpoint with both pre-training heads
        (maskrcnn(), 44_401_393),  # torchvision's maskrcnn_resnet50_fpn
        (t5_3b(ranks=1), 2_851_598_336),  # the published t5-3b checkpoint
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_parameters_are_as_many_as_published(model, published):
    assert model.parameters == published


def test_the_encoder_of_bert_large_is_as_large_as_published():
    heads = sum(layer.elements for layer in bert_large().layers if layer.name.startswith(("mlm.", "nsp")))
    assert bert_large().parameters - heads == 335_141_888


def test_work_is_as_much_as_published():
    # torchvision: "GFLOPS 4.09" for resnet50, in multiply-adds, at 224 x 224.
    assert resnet50().macs / 1e9 == pytest.approx(4.09, abs=0.005)
    # A transformer does one multiply-add per weight of its matrices and token, and attention's products.
    matrices, tokens = 24 * (4 * 1024**2 + 2 * 1024 * 4096), 128
    heads = 1024**2 + 20 * (1024**2 + 30_522 * 1024) + 2 * 1024
    assert bert_large().macs == tokens * matrices + 24 * 2 * tokens**2 * 1024 + heads


def test_the_shares_of_t5_make_up_the_whole_but_for_the_norms_that_every_rank_has():
    norms = sum(layer.elements for layer in t5_3b().layers if "norm" in layer.name)
    assert norms == (24 * 2 + 24 * 3 + 2) * 1024
    assert T5_RANKS * t5_3b().parameters - (T5_RANKS - 1) * norms == t5_3b(ranks=1).parameters


def test_mask_rcnn_reduces_no_gradients_of_what_is_not_trained():
    # The 7x7 of conv1, and the first stage of He et al.'s table 1: three blocks of 1x1, 3x3 and 1x1, and a projection.
    first, others = 64 * 64 + 64 * 64 * 9 + 64 * 256, 256 * 64 + 64 * 64 * 9 + 64 * 256
    frozen = 3 * 64 * 49 + first + 2 * others + 64 * 256
    assert maskrcnn().parameters - maskrcnn().gradient_elements == frozen
    names = {gradient.name for gradient in gradients(maskrcnn())}
    assert not any(name == "backbone.conv1" or name.startswith("backbone.layer1.") for name in names)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_come_in_the_order_of_backward_and_add_up(name):
    model = MODELS[name]()
    found = gradients(model)
    assert sum(gradient.elements for gradient in found) == model.gradient_elements
    shares = [gradient.ready for gradient in found]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.1
    assert shares[-1] == pytest.approx(1)


def test_the_first_and_the_last_gradients():
    of_resnet = gradients(resnet50())
    assert [(each.name, each.elements) for each in of_resnet[:2]] == [("fc", 1000), ("fc", 2_048_000)]
    assert (of_resnet[-1].name, of_resnet[-1].elements) == ("conv1", 9408)
    # Tied matrices: one gradient, whole at the very end, and the largest of all.
    for model, elements in ((bert_large(), 30_522 * 1024), (t5_3b(), 32_128 // T5_RANKS * 1024)):
        last = gradients(model)[-3:] if model.name == "bert-large" else gradients(model)[-1:]
        assert max(each.elements for each in last) == elements
        assert all(each.ready == 1 for each in last)


SMALL = Model(
    "small",
    "made up",
    (
        Layer("frozen", ((8,),), macs=1000, is_frozen=True),
        Layer("first", ((10, 3), (3,)), macs=60),
        Layer("norm", ((4,),)),
        Layer("products", (), macs=20),
        Layer("last", ((5,),), macs=20),
    ),
)


def test_time_goes_by_work_and_frozen_layers_take_none():
    assert gradients(SMALL) == [
        Gradient("last", 5, 0.2),
        Gradient("norm", 4, 0.4),
        Gradient("first", 3, 1.0),
        Gradient("first", 30, 1.0),
    ]


def test_scaling_shrinks_gradients_and_leaves_the_times():
    assert [(each.elements, each.ready) for each in gradients(SMALL, 0.1)] == [(1, 0.2), (1, 0.4), (1, 1.0), (3, 1.0)]
    for bad in (0, -1, 1.5, float("nan")):
        with pytest.raises(herring.InvalidArgumentError, match="--scale"):
            gradients(SMALL, bad)


def test_a_bucket_is_ready_with_its_last_gradient():
    found = [Gradient("a", 1, 0.1), Gradient("b", 5, 0.3), Gradient("c", 2, 0.5), Gradient("d", 1, 1.0)]
    expected = [Bucket(1, 1, 0.1), Bucket(7, 2, 0.5), Bucket(1, 1, 1.0)]
    assert buckets(found, 4, [4, 24]) == expected


@needs_torch
@pytest.mark.parametrize("caps", [(25,), (1, 25), (1, 2, 4, 8, 16, 25)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_those_of_torch(name, caps):
    import torch
    import torch.distributed as dist

    found = gradients(MODELS[name](), 0.5)
    caps_bytes = [cap * MB for cap in caps]
    tensors = [torch.empty(gradient.elements, device="meta") for gradient in found]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps_bytes)
    assert list(itertools.chain(*theirs)) == list(range(len(found))), "torch keeps the order"
    ours = buckets(found, 4, caps_bytes)
    assert [bucket.tensors for bucket in ours] == [len(each) for each in theirs]
    assert [bucket.elements for bucket in ours] == [sum(found[i].elements for i in each) for each in theirs]


def test_a_step_ends_when_the_last_bucket_is_reduced():
    filled = [Bucket(25, 1, 0.25), Bucket(50, 1, 0.5), Bucket(25, 1, 1.0)]
    # 2 s of communication: nothing is in its way but the last bucket, which takes a quarter of it.
    assert expected_step(filled, backward_s=4.0, communication_s=2.0) == pytest.approx(4.5)
    # 40 s: once begun, after the first quarter of backward, it never stops.
    assert expected_step(filled, backward_s=4.0, communication_s=40.0) == pytest.approx(41)
    # 8 s: the second bucket starts when the first is done, and the third when the second is.
    assert expected_step(filled, backward_s=4.0, communication_s=8.0) == pytest.approx(9)


@pytest.mark.parametrize("efficiency", [0.05, 0.5, 0.85, 0.99])
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_time_for_an_efficiency_gives_it(name, efficiency):
    filled = buckets(gradients(MODELS[name]()), 4, [MB, 25 * MB])
    backward_s = backward_for(filled, communication_s=3.0, efficiency=efficiency)
    assert backward_s / expected_step(filled, backward_s, 3.0) == pytest.approx(efficiency)


@pytest.mark.parametrize("efficiency", [0, 1, -0.5, 1.5])
def test_no_backward_time_gives_an_impossible_efficiency(efficiency):
    with pytest.raises(herring.InvalidArgumentError, match="above 0 % and below 100 %"):
        backward_for([Bucket(1, 1, 1.0)], 1.0, efficiency)
