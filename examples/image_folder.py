"""A folder of images, a folder in it for each class, and a small ResNet. The images are some of the embedded digits,
written here; Pillow is needed (extra: images).

python examples/image_folder.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor, nn

import pfedlms

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_images(folder: Path, count: int = 300) -> None:
    """FOLDER/two/17.png, …"""
    x, y = pfedlms.load_dataset("digits")
    pixels = np.rint(255 * (x[:, 0] - x.min()) / (x.max() - x.min())).astype(np.uint8)
    for number, label in enumerate(y[:count]):
        own = folder / NAMES[label]
        own.mkdir(exist_ok=True)
        Image.fromarray(pixels[number]).save(own / f"{number}.png")


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x + self.layers(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Block(8), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        Block(16), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, len(NAMES)),
    )  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for method, settings in (("local", {}), ("fedavg", {}), ("sketchvote", {"ratio": 0.3})):
            result = pfedlms.run(
                f"folder:{folder}", resnet, method=method, clients=5, partition="iid", rounds=24, local_steps=5,
                batch_size=16, optimizer="adamw", learning_rate=0.01, evaluate_every=6, **settings,
            )  # fmt: skip
            sent = sum(result.summary["bytes_per_round"].values()) / 2**10
            print(f"{method:10s} {result.summary['accuracy']['final']:5.1f} %   {sent:6.1f} KiB a round")
        print("outputs stand for:", ", ".join(result.classes))


if __name__ == "__main__":
    main()
