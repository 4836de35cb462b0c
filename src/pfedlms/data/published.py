"""What the authors of the data sets published: where it can be had, how long each file is, and its checksum."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pfedlms.errors import DataError


@dataclass(frozen=True)
class Published:
    """A file to download; the first of `urls` that has it is taken."""

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]


def _files(mirrors: tuple[str, ...], *files: tuple[str, int, str]) -> tuple[Published, ...]:
    return tuple(
        Published(name, size, sha256, tuple(f"{mirror}/{name}" for mirror in mirrors)) for name, size, sha256 in files
    )


DOWNLOADS: dict[str, tuple[Published, ...]] = {
    "mnist": _files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fmnist": _files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        ),
        ("train-images-idx3-ubyte.gz", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "svhn": _files(
        ("http://ufldl.stanford.edu/housenumbers",),
        ("train_32x32.mat", 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ),
    "cifar10": _files(
        ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz"),
        ("cifar-10-python.tar.gz", 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    ),
    "cifar100": _files(
        ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz"),
        ("cifar-100-python.tar.gz", 169001437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    ),
}
"""By data set."""

SHARDS = {
    "cifar10": {
        "train-00000-of-00002.parquet": (44631675, "beec3243c7ff3130b8234a82ad65ca5bb1574b76c30e86482c567e7cf782b194"),
        "train-00001-of-00002.parquet": (44566973, "b17890ee584b7fca943933d72be50b452dbbb898a1770a86d594b58b158669e9"),
        "test-00000-of-00001.parquet": (17850840, "6a78e7f8b70c39ce719dc41cba1c6e87de078bdef47b125ee6f3e024f61d7e4c"),
    },
}
"""Sizes and SHA-256 of Parquet files as a hub has them; there may be others of the same names and of other sizes."""

BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
"""MD5 of the pickled batches of CIFAR-10 and of CIFAR-100 (the last two), as their authors' archives unpack."""


WHOSE = {
    "741c988805d008ac": "mnist",  # train images, train labels, test images, test labels
    "1feba77c54802fa5": "mnist",
    "6d87418db22cc802": "mnist",
    "ddeff807876a9661": "mnist",
    "2e487a6c89124f78": "fmnist",
    "657fbd221bfc9f41": "fmnist",
    "c867c93ff9536059": "fmnist",
    "3d0e6c6ea990b53b": "fmnist",
}
"""Data sets whose IDX files have the same names and shapes, by the first 64 bits of the SHA-256 of what is after the
header."""

_SAMPLES = {
    **dict.fromkeys(("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), 60_000),
    **dict.fromkeys(("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"), 10_000),
    "train_32x32.mat": 73_257,
    "test_32x32.mat": 26_032,
    **dict.fromkeys(BATCHES, 10_000),
    "train": 50_000,
}
"""Of each file as published, by its name without `.gz` and `.bin`."""


def samples_in(path: Path) -> int | None:
    """How many samples the published file of this name has; None of archives and Parquet files, which may be split
    otherwise."""
    return _SAMPLES.get(path.name.removesuffix(".gz").removesuffix(".bin").replace(".idx", "-idx"))


def check_published(name: str, path: Path, content: bytes) -> None:
    """Refuse a file as long as the published one of its name that is not that one: not every format has checksums of
    its own, and none has them for every byte."""
    size, expected = _known(name).get(path.name, (None, ""))
    if len(content) == size and (digest := hashlib.sha256(content).hexdigest()) != expected:
        raise DataError(
            f"{path}: has {size:,} bytes as the published file, but not its checksum (SHA-256 {digest}, expected "
            f"{expected}); remove it and fetch it again, or load one that was changed on purpose in Python"
        )


def _known(name: str) -> dict[str, tuple[int, str]]:
    """Sizes and SHA-256 of files of the data set `name`, by their names."""
    return {**{each.name: (each.size, each.sha256) for each in DOWNLOADS.get(name, ())}, **SHARDS.get(name, {})}


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in _parts(path):
        digest.update(part)
    return digest.hexdigest()


def is_published(name: str, path: Path) -> bool | None:
    """Whether a file that can be read is, byte for byte, what was published of the data set `name` under its name; an
    IDX file may be gzipped otherwise. None where nothing is known of such a file."""
    size, sha256 = _known(name).get(path.name, (None, ""))
    same = digest_of(path) == sha256 if path.stat().st_size == size else None
    if same:
        return True
    if "idx" in path.name:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return WHOSE.get(hashlib.sha256(content[16 if "idx3" in path.name else 8 :]).hexdigest()[:16]) == name
    if path.name in BATCHES:
        return md5_of(path.read_bytes()) == BATCHES[path.name]
    return False if path.name in {each.name for each in DOWNLOADS.get(name, ())} else same


def md5_of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                yield part
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
