"""Nets built as torchvision and timm build them: modules of torch alone, told by what they are and where they stand."""

from __future__ import annotations

import torch
from torch import nn

from hf_emopt import route_parameters


class Bottleneck(nn.Module):
    """torchvision's, with a shortcut."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))


class TorchvisionResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Bottleneck(16, 8))
        self.fc = nn.Linear(32, 10)


class TorchvisionMobileNet(nn.Module):
    """``features`` with depthwise convolutions and squeeze-and-excite of few channels, ``classifier`` a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.Conv2d(32, 32, 3, groups=32, bias=False))
        block.se = nn.Sequential(nn.Conv2d(32, 4, 1), nn.Conv2d(4, 32, 1))
        self.features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)), block)
        self.classifier = nn.Sequential(nn.Linear(32, 64), nn.Hardswish(), nn.Linear(64, 10))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))


class TimmViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 5, 16))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, 16, 4, 4)
        block = nn.Module()
        block.attn, block.ls1, block.mlp = nn.Module(), LayerScale(16), nn.Module()
        block.attn.proj = nn.Linear(16, 16)
        block.mlp.fc1, block.mlp.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.blocks, self.head = nn.Sequential(block), nn.Linear(16, 10)


class TimmConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16))
        block, stage = nn.Module(), nn.Module()
        block.conv_dw, block.gamma = nn.Conv2d(16, 16, 7, groups=16), nn.Parameter(torch.ones(16, 1, 1))
        block.mlp = nn.Module()
        block.mlp.fc1, block.mlp.fc2 = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)
        stage.downsample, stage.blocks = (
            nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, 16, 2, 2)),
            nn.Sequential(block),
        )
        self.stages, self.head = nn.Sequential(stage), nn.Module()
        self.head.norm, self.head.fc = nn.LayerNorm(16), nn.Linear(16, 10)


def matrices(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    return {route.name: route.matrix_views[0].shape for route in route_parameters(model).matrices}


def roles(model: nn.Module) -> dict[str, str]:
    return {r.name: r.role for r in route_parameters(model).aux if len(r.shape) > 1}


def test_a_residual_net() -> None:
    assert matrices(TorchvisionResNet()) == {
        "layer1.0.conv1.weight": (1, 8, 16),
        "layer1.0.conv2.weight": (1, 8, 72),
        "layer1.0.conv3.weight": (1, 32, 8),
        "layer1.0.downsample.0.weight": (1, 32, 16),
    }
    assert roles(TorchvisionResNet()) == {"conv1.weight": "embedding", "fc.weight": "head"}


def test_a_net_of_depthwise_convolutions() -> None:
    assert matrices(TorchvisionMobileNet()) == {
        "features.1.0.weight": (1, 32, 16),
        "features.1.se.0.weight": (1, 4, 32),
        "features.1.se.1.weight": (1, 32, 4),  # four channels, but not those of an image
        "classifier.0.weight": (1, 64, 32),
    }
    assert roles(TorchvisionMobileNet()) == {
        "features.0.0.weight": "embedding",
        "features.1.1.weight": "depthwise",
        "classifier.2.weight": "head",
    }


def test_a_vision_transformer() -> None:
    assert matrices(TimmViT()) == {
        "blocks.0.attn.proj.weight": (1, 16, 16),
        "blocks.0.mlp.fc1.weight": (1, 64, 16),
        "blocks.0.mlp.fc2.weight": (1, 16, 64),
    }
    found = roles(TimmViT())
    assert found["patch_embed.proj.weight"] == "embedding"
    assert found["head.weight"] == "head"
    assert {"cls_token", "pos_embed"} <= set(found)


def test_a_convolutional_net_with_gains_of_three_dimensions() -> None:
    assert matrices(TimmConvNeXt()) == {
        "stages.0.downsample.1.weight": (1, 16, 64),
        "stages.0.blocks.0.mlp.fc1.weight": (1, 64, 16),
        "stages.0.blocks.0.mlp.fc2.weight": (1, 16, 64),
    }
    assert roles(TimmConvNeXt()) == {
        "stem.0.weight": "embedding",
        "stages.0.blocks.0.conv_dw.weight": "depthwise",
        "stages.0.blocks.0.gamma": "gain",
        "head.fc.weight": "head",
    }


def test_a_first_convolution_of_one_pixel_reads_the_input() -> None:
    model = nn.Sequential(nn.Conv1d(3, 16, 1), nn.Conv1d(16, 3, 1), nn.Conv1d(3, 16, 1))
    assert {r.name for r in route_parameters(model).matrices} == {"1.weight", "2.weight"}
