"""A small convolutional network for images of 32 x 32 pixels."""

from __future__ import annotations

from torch import nn


class CNN(nn.Sequential):
    """Three blocks of convolution, pooling, normalisation and ReLU, and a linear layer.

    GroupNorm, since BatchNorm would take its mean over a rank's share of the batch: two ranks would train another
    model than one (what SyncBatchNorm mends, with a collective in every layer). GroupNorm looks at one image at a time.

    Args:
        num_classes: logits of an image.
        width: channels of the first block; each of the others has twice as many as the one before.
    """

    def __init__(self, num_classes: int = 10, width: int = 32) -> None:
        channels = [3, width, 2 * width, 4 * width]
        blocks = [block(*channels[i : i + 2]) for i in range(3)]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(4 * width * 4 * 4, num_classes))


def block(inputs: int, outputs: int) -> nn.Sequential:
    """(batch, inputs, side, side) -> (batch, outputs, side / 2, side / 2)."""
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.MaxPool2d(2), nn.GroupNorm(8, outputs), nn.ReLU())
