"""A small convolutional network for images of 32 x 32 pixels."""

from __future__ import annotations

from torch import nn


class CNN(nn.Sequential):
    """Three blocks of convolution, pooling, normalization and ReLU, then a linear layer.

    Args:
        num_classes: logits per image.
        width: channels of the first block; each further block doubles them.
    """

    def __init__(self, num_classes: int = 10, width: int = 32) -> None:
        channels = [3, width, 2 * width, 4 * width]
        blocks = [block(*channels[i : i + 2]) for i in range(3)]
        # Three poolings: 32 x 32 pixels have become 16 x 16, 8 x 8 and then 4 x 4.
        super().__init__(*blocks, nn.Flatten(), nn.Linear(4 * width * 4 * 4, num_classes))


def block(inputs: int, outputs: int) -> nn.Sequential:
    """(batch, inputs, side, side) -> (batch, outputs, side / 2, side / 2)."""
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    # GroupNorm instead of BatchNorm, which would use the mean over a rank's share of the batch, so
    # that two ranks would train a different model than one. (SyncBatchNorm fixes that with a
    # collective in every layer.) GroupNorm looks at one image at a time.
    return nn.Sequential(convolution, nn.MaxPool2d(2), nn.GroupNorm(8, outputs), nn.ReLU())
