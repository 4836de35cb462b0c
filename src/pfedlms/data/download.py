"""The published files of data sets: where they are, and their checksums. Fetched by pooch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pfedlms.data.disk import explain_missing_package
from pfedlms.errors import DataError, DownloadError, did_you_mean, reason

_TORONTO = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")
MIRRORS: dict[str, tuple[str, ...]] = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    "fmnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ),
    "svhn": ("http://ufldl.stanford.edu/housenumbers",),
    "cifar10": _TORONTO,
    "cifar100": _TORONTO,
}
FILES: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fmnist": {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    "svhn": {
        "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    },
    "cifar10": {"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
    "cifar100": {"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
}
"""SHA-256 of each file, by data set."""

NOT_DOWNLOADABLE = {
    "shakespeare": 'put speakers.jsonl.gz, with a line {"client": "play/speaker", "text": "…"} for each speaker, into '
    "DIR/shakespeare, or read LEAF's files with --dataset file:PATH.json",
}
"""Data sets that nobody offers for download, and how users get them."""


def download(name: str, directory: str | Path, force: bool = False, progress: Any = False) -> Iterator[Path]:
    """Fetch the files of the data set `name` into `directory`/`name`, and yield the path of each once its checksum is
    right. A file there with another checksum is refused, or replaced with `force`. `progress` is a progress bar for
    pooch."""
    if name in NOT_DOWNLOADABLE:
        raise DataError(f"data download: nobody offers {name} for download; {NOT_DOWNLOADABLE[name]}")
    if name not in FILES:
        raise DataError(f"data download: got {name!r}; {did_you_mean(name, FILES)}")
    with explain_missing_package("downloads"):
        import pooch
    pooch.get_logger().setLevel("WARNING")
    folder = Path(directory) / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, sha256 in FILES[name].items():
        path = folder / file
        if path.exists() and pooch.file_hash(str(path)) != sha256 and not force:
            raise DataError(f"{path}: is not the published file; remove it, or replace it with --force")
        yield _fetch(path, sha256, [f"{mirror}/{file}" for mirror in MIRRORS[name]], progress)


def _fetch(path: Path, sha256: str, urls: list[str], progress: Any) -> Path:
    """Fetch a file from the first mirror that has it. Pooch gives a file its name once the checksum is right."""
    import pooch
    import requests

    failures = []
    for url in urls:
        loader = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16)
        try:
            return Path(pooch.retrieve(url, sha256, path.name, path.parent, downloader=loader))
        except (requests.RequestException, ValueError) as error:  # ValueError: another checksum
            failures.append(f"{url}: {reason(error)}")
    by_hand = f"{path}: no mirror gave it; try again later, or put it there by hand (SHA-256 {sha256}):"
    raise DownloadError("\n".join([by_hand, *failures]))
