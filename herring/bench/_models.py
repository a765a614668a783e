"""The models of `herring bench replay`: sizes and work of every layer, from the published architectures.

Pure arithmetic; no framework is needed. A model is a list of layers in the order of the forward pass. `macs` are the
multiply-adds of a layer's matrix products and convolutions for one sample; normalisations, activations, softmax and
lookups count as none. Attention's products with no parameters are layers that only take time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Layer:
    """`shapes` of the parameters in the order in which they are registered. `is_frozen`: has no gradients, and backward
    does not come here."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    macs: int = 0
    is_frozen: bool = False

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(map(prod, self.shapes))


@dataclass(frozen=True)
class Model:
    """`layers` in the order of the forward pass; `source`: where the architecture is published, and what is taken."""

    name: str
    source: str
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        """Elements of all parameters, frozen ones too."""
        return sum(layer.elements for layer in self.layers)

    @property
    def gradient_elements(self) -> int:
        """Elements that are reduced in each step."""
        return sum(layer.elements for layer in self.layers if not layer.is_frozen)

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward pass for one sample."""
        return sum(layer.macs for layer in self.layers)


def _linear(name: str, inputs: int, outputs: int, rows: int, *, bias: bool = True) -> Layer:
    shapes = ((outputs, inputs), (outputs,)) if bias else ((outputs, inputs),)
    return Layer(name, shapes, rows * inputs * outputs)


def _norm(name: str, width: int) -> Layer:
    """Weight and bias: LayerNorm, BatchNorm."""
    return Layer(name, ((width,), (width,)))


def _conv(name: str, inputs: int, outputs: int, kernel: int, pixels: int, *, bias: bool = False) -> Layer:
    weight = (outputs, inputs, kernel, kernel)
    return Layer(name, (weight, (outputs,)) if bias else (weight,), prod(weight) * pixels)


def _half(size: tuple[int, int]) -> tuple[int, int]:
    return (size[0] + 1) // 2, (size[1] + 1) // 2


# --- ResNet-50: He et al., arXiv:1512.03385, table 1 (50-layer), with the stride in the 3x3 convolution as torchvision
# and NVIDIA have it ("v1.5"). torchvision states 25,557,032 parameters and 4.09 G multiply-adds at 224 x 224.

_RESNET50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
_EXPANSION = 4


def _bottleneck(name: str, inputs: int, width: int, size: tuple[int, int], stride: int) -> list[Layer]:
    outside = _half(size) if stride == 2 else size
    outputs = width * _EXPANSION
    layers = [
        _conv(f"{name}.conv1", inputs, width, 1, prod(size)),
        _norm(f"{name}.bn1", width),
        _conv(f"{name}.conv2", width, width, 3, prod(outside)),
        _norm(f"{name}.bn2", width),
        _conv(f"{name}.conv3", width, outputs, 1, prod(outside)),
        _norm(f"{name}.bn3", outputs),
    ]
    if inputs != outputs:
        layers.append(_conv(f"{name}.downsample.0", inputs, outputs, 1, prod(outside)))
        layers.append(_norm(f"{name}.downsample.1", outputs))
    return layers


def _resnet50_body(image: tuple[int, int]) -> list[Layer]:
    """Everything before the pooling."""
    size = _half(image)
    layers = [_conv("conv1", 3, 64, 7, prod(size)), _norm("bn1", 64)]
    size = _half(size)  # the 3x3 max pooling
    inputs = 64
    for stage, (blocks, width) in enumerate(_RESNET50_STAGES, 1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            layers += _bottleneck(f"layer{stage}.{block}", inputs, width, size, stride)
            size = _half(size) if stride == 2 else size
            inputs = width * _EXPANSION
    return layers


def resnet50() -> Model:
    """ResNet-50, 1000 classes, 224 x 224."""
    layers = [*_resnet50_body((224, 224)), _linear("fc", 2048, 1000, 1)]
    return Model("resnet50", "He et al., arXiv:1512.03385, table 1; torchvision resnet50, 224 x 224", tuple(layers))


# --- Mask R-CNN R50-FPN: He et al., arXiv:1703.06870, section 3 and figure 4 (right), on Lin et al., arXiv:1612.03144;
# widths as torchvision's maskrcnn_resnet50_fpn, which states 44,401,393 parameters (91 classes). BatchNorm is frozen
# into constants, which are not parameters; conv1 and the first stage are not trained.

_FPN_WIDTH = 256
_MASK_RCNN_CLASSES = 91
_MASK_RCNN_IMAGE = (800, 1344)  # 800 x 1333, padded to a multiple of 32
_ANCHORS = 3
_BOXES, _MASKS = 512, 128  # regions per image in training; a quarter of them are positive at most


def _fpn(levels: list[tuple[int, int]]) -> list[Layer]:
    layers = []
    for level in reversed(range(len(levels))):
        pixels = prod(levels[level])
        inputs = _RESNET50_STAGES[level][1] * _EXPANSION
        layers.append(_conv(f"fpn.inner_blocks.{level}", inputs, _FPN_WIDTH, 1, pixels, bias=True))
        layers.append(_conv(f"fpn.layer_blocks.{level}", _FPN_WIDTH, _FPN_WIDTH, 3, pixels, bias=True))
    return layers


def maskrcnn() -> Model:
    """Mask R-CNN with a ResNet-50 and feature pyramid, COCO, one 800 x 1333 image."""
    width, classes = _FPN_WIDTH, _MASK_RCNN_CLASSES
    levels = [_half(_half(_MASK_RCNN_IMAGE))]
    for _ in range(3):
        levels.append(_half(levels[-1]))
    anchored = sum(map(prod, [*levels, _half(levels[-1])]))
    layers = []
    for layer in _resnet50_body(_MASK_RCNN_IMAGE):
        if ".bn" in layer.name or layer.name == "bn1" or layer.name.endswith("downsample.1"):
            continue
        is_frozen = layer.name == "conv1" or layer.name.startswith("layer1.")
        layers.append(Layer(f"backbone.{layer.name}", layer.shapes, layer.macs, is_frozen))
    layers += _fpn(levels)
    layers += [
        _conv("rpn.head.conv", width, width, 3, anchored, bias=True),
        _conv("rpn.head.cls_logits", width, _ANCHORS, 1, anchored, bias=True),
        _conv("rpn.head.bbox_pred", width, 4 * _ANCHORS, 1, anchored, bias=True),
        _linear("box_head.fc6", width * 7 * 7, 1024, _BOXES),
        _linear("box_head.fc7", 1024, 1024, _BOXES),
        _linear("box_predictor.cls_score", 1024, classes, _BOXES),
        _linear("box_predictor.bbox_pred", 1024, 4 * classes, _BOXES),
    ]
    layers += [_conv(f"mask_head.{i}", width, width, 3, _MASKS * 14 * 14, bias=True) for i in range(4)]
    # A transposed convolution: 2 x 2 outputs of every input.
    layers.append(_conv("mask_predictor.conv5_mask", width, width, 2, _MASKS * 14 * 14, bias=True))
    layers.append(_conv("mask_predictor.mask_fcn_logits", width, classes, 1, _MASKS * 28 * 28, bias=True))
    source = "He et al., arXiv:1703.06870, fig. 4; torchvision maskrcnn_resnet50_fpn, 800 x 1333; conv1, layer1 frozen"
    return Model("maskrcnn", source, tuple(layers))


# --- BERT-large: Devlin et al., arXiv:1810.04805, section 3 (L=24, H=1024, A=16), with both pre-training heads; the
# vocabulary of google-research/bert, 30,522. 336,226,108 parameters (335,141,888 without the heads).

_BERT_TOKENS, _BERT_PREDICTIONS = 128, 20  # max_seq_length of 90 % of the steps; max_predictions_per_seq


def bert_large() -> Model:
    """BERT-large in pre-training, sequences of 128 tokens."""
    width, inner, tokens, vocabulary = 1024, 4096, _BERT_TOKENS, 30_522
    layers = [
        Layer("embeddings", ((vocabulary, width), (512, width), (2, width))),
        _norm("embeddings.norm", width),
    ]
    for i in range(24):
        name = f"layer.{i}"
        layers += [_linear(f"{name}.attention.{which}", width, width, tokens) for which in ("query", "key", "value")]
        layers += [
            Layer(f"{name}.attention.products", (), 2 * tokens * tokens * width),
            _linear(f"{name}.attention.output", width, width, tokens),
            _norm(f"{name}.attention.norm", width),
            _linear(f"{name}.intermediate", width, inner, tokens),
            _linear(f"{name}.output", inner, width, tokens),
            _norm(f"{name}.norm", width),
        ]
    layers += [
        _linear("pooler", width, width, 1),
        _linear("mlm.transform", width, width, _BERT_PREDICTIONS),
        _norm("mlm.norm", width),
        # Its weight is the word embeddings': that gradient is whole when backward has come to them, last.
        Layer("mlm.decoder", ((vocabulary,),), _BERT_PREDICTIONS * width * vocabulary),
        _linear("nsp", width, 2, 1),
    ]
    return Model(
        "bert-large", "Devlin et al., arXiv:1810.04805, section 3; 128 tokens, MLM and NSP heads", tuple(layers)
    )


# --- T5-3B: Raffel et al., arXiv:1910.10683, section 3.7 ("3B": 24 + 24 blocks, d_model 1024, d_ff 16,384, d_kv 128, 32
# heads), vocabulary of 32,128 as published in its code; 2,851,598,336 parameters. It did not fit an accelerator of its
# time, optimizer and all, so it is trained model-parallel, and each rank averages its share with its data-parallel
# twins. The share taken here is one of 8 tensor-parallel ranks' (Shoeybi et al., arXiv:1909.08053, section 3): an
# eighth of the embedding, of each attention's heads and of each feed-forward's width; norms are on every rank.

T5_RANKS = 8
_T5_INPUTS, _T5_TARGETS = 512, 114  # tokens, of pre-training by span corruption


class _T5Share:
    """What one of `ranks` tensor-parallel ranks has of a block."""

    def __init__(self, ranks: int) -> None:
        self.width = 1024
        self.inner = 16_384 // ranks
        self.heads = 32 // ranks
        self.attended = self.heads * 128

    def attention(self, name: str, queries: int, keys: int, *, bias: bool) -> list[Layer]:
        """`bias`: has the stack's table of relative positions, in its first block."""
        layers = [_linear(f"{name}.q", self.width, self.attended, queries, bias=False)]
        layers += [_linear(f"{name}.{which}", self.width, self.attended, keys, bias=False) for which in ("k", "v")]
        if bias:
            layers.append(Layer(f"{name}.relative_attention_bias", ((32, self.heads),)))
        layers.append(Layer(f"{name}.products", (), 2 * queries * keys * self.attended))
        layers.append(_linear(f"{name}.o", self.attended, self.width, queries, bias=False))
        return layers

    def block(self, name: str, tokens: int, crossed: int, *, first: bool) -> list[Layer]:
        """`crossed`: tokens of the encoder that the decoder attends to; 0 in the encoder."""
        scale = ((self.width,),)
        layers = [Layer(f"{name}.norm", scale), *self.attention(f"{name}.self", tokens, tokens, bias=first)]
        if crossed:
            layers.append(Layer(f"{name}.cross_norm", scale))
            layers += self.attention(f"{name}.cross", tokens, crossed, bias=False)
        return [
            *layers,
            Layer(f"{name}.ff_norm", scale),
            _linear(f"{name}.wi", self.width, self.inner, tokens, bias=False),
            _linear(f"{name}.wo", self.inner, self.width, tokens, bias=False),
        ]


def t5_3b(ranks: int = T5_RANKS) -> Model:
    """The share of one of `ranks` tensor-parallel ranks (1: the whole model). `ranks` divides 32."""
    share, vocabulary = _T5Share(ranks), 32_128 // ranks
    # Tied with the output's matrix, so its gradient is whole when backward has come to the encoder's input, last.
    layers = [Layer("shared", ((vocabulary, share.width),))]
    for i in range(24):
        layers += share.block(f"encoder.{i}", _T5_INPUTS, 0, first=i == 0)
    layers.append(Layer("encoder.norm", ((share.width,),)))
    for i in range(24):
        layers += share.block(f"decoder.{i}", _T5_TARGETS, _T5_INPUTS, first=i == 0)
    layers.append(Layer("decoder.norm", ((share.width,),)))
    layers.append(Layer("lm_head", (), _T5_TARGETS * share.width * vocabulary))
    part = "whole" if ranks == 1 else f"the share of one of {ranks} tensor-parallel ranks (arXiv:1909.08053)"
    source = f"Raffel et al., arXiv:1910.10683, section 3.7; 512 + 114 tokens; {part}"
    return Model("t5-3b", source, tuple(layers))


MODELS: Mapping[str, Callable[[], Model]] = {
    "resnet50": resnet50,
    "bert-large": bert_large,
    "maskrcnn": maskrcnn,
    "t5-3b": t5_3b,
}
