"""Data that `run` and `compare` accept in Python: every kind is compared with plain arrays, and every wrong kind is
refused. The table in the documentation has a row for each kind."""

from __future__ import annotations

import hashlib
from collections import UserList
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_matrix
from torch import nn
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset

import pfedlms
from pfedlms.data import FederatedData, Partitioning, from_pairs, from_pool, partitioned, read
from pfedlms.errors import DataError, PfedlmsError, UsageError

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
TRAIN, TEST = (X[:40], Y[:40]), (X[40:], Y[40:])
PIXELS = RANDOM.integers(0, 256, size=(60, 5, 6, 3), dtype=np.uint8)
TOKENS = RANDOM.integers(0, 50, size=(60, 7))
NAMES = ("cat", "dog", "eel")
TEXTS = np.array(NAMES)[Y]
PARTITION = (3, 0.5, 1)


def equal_data(given: FederatedData, plain: FederatedData) -> bool:
    """Whether samples, labels, the sets of all clients and the number of classes are equal."""
    exact = given.x.dtype == plain.x.dtype and torch.equal(given.x, plain.x) and torch.equal(given.y, plain.y)
    parts = ((given.train, plain.train), (given.test, plain.test), (given.validation, plain.validation))
    held = all(len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in parts)
    return exact and held and given.classes == plain.classes


class Items(Dataset[Any]):
    """A custom map-style data set."""

    def __init__(self, samples: Sequence[Any], labels: Sequence[Any], classes: Any = None) -> None:
        self.samples, self.labels, self.classes = samples, labels, classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> Any:
        return self.samples[place], self.labels[place]


class Table:
    """Has the attributes of a Hugging Face Dataset that are read. A column of `datasets` 4 is no list."""

    def __init__(self, names: Sequence[str] = (), /, **columns: Any) -> None:
        self.columns = columns
        self.features = dict.fromkeys(columns) | ({"label": SimpleNamespace(names=list(names))} if names else {})

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: own[key] for name, own in self.columns.items()}


class Tables(dict[str, Any]):
    """Has the attributes of a DatasetDict that are used."""

    @property
    def column_names(self) -> dict[str, list[str]]:
        return {name: table.column_names for name, table in self.items()}

    @property
    def shape(self) -> dict[str, tuple[int, int]]:
        return {name: table.shape for name, table in self.items()}


def tensors(*arrays: np.ndarray) -> TensorDataset:
    return TensorDataset(*map(torch.from_numpy, arrays))


def images() -> list[Image.Image]:
    return [Image.fromarray(pixels) for pixels in PIXELS]


# --- one data set that is partitioned ---

AS_IMAGES = PIXELS.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
POOLS: dict[str, tuple[Callable[[], Any], Any]] = {
    "tensors": (lambda: (torch.from_numpy(X), torch.from_numpy(Y)), X),
    "lists": (lambda: (X.tolist(), Y.tolist()), X),
    "bfloat16": (lambda: (torch.from_numpy(X).bfloat16(), Y), torch.from_numpy(X).bfloat16().float().numpy()),
    "read-only arrays": (lambda: (np.frombuffer(X.tobytes(), np.float32).reshape(X.shape), Y), X),
    "booleans": (lambda: (X > 0, Y), (X > 0).astype(np.float32)),
    "columns that pandas calls nullable": (lambda: (pandas.DataFrame(X).convert_dtypes(), Y), X),
    "columns of numbers and booleans": (
        lambda: (pandas.DataFrame({"a": X[:, 0], "b": X[:, 1] > 0}), Y),
        np.stack([X[:, 0], X[:, 1] > 0], axis=1),
    ),
    "token ids": (lambda: (TOKENS, Y), TOKENS),
    "token ids of 8 bits": (lambda: (TOKENS.astype(np.uint8), Y), TOKENS),
    "image bytes": (lambda: (PIXELS, Y), PIXELS.astype(np.float32)),
    "Pillow images": (lambda: (images(), Y), AS_IMAGES),
    "TensorDataset": (lambda: tensors(X, Y), X),
    "Dataset": (lambda: Items(torch.from_numpy(X), torch.from_numpy(Y)), X),
    "Dataset of dicts": (lambda: StackDataset(text=["…"] * 60, input_ids=TOKENS.tolist(), label=Y.tolist()), TOKENS),
    "Subset": (lambda: Subset(tensors(np.tile(X, (2, 1)), np.tile(Y, 2)), range(60, 120)), X),
    "Hugging Face, columns by name": (
        lambda: Table(text=["…"] * 60, input_ids=UserList(TOKENS.tolist()), attention_mask=TOKENS, labels=UserList(Y)),
        TOKENS,
    ),
    "Hugging Face, in torch format": (lambda: Table(made=torch.from_numpy(X), y=torch.from_numpy(Y)), X),
    "Hugging Face, images": (lambda: Table(img=images(), fine_label=Y.tolist(), coarse_label=[0] * 60), AS_IMAGES),
    "(train, test) Datasets": (lambda: (tensors(*TRAIN), Items(*TEST)), X),
    "DatasetDict of other splits": (lambda: Tables(a=Table(x=TRAIN[0], y=TRAIN[1]), b=Table(x=TEST[0], y=TEST[1])), X),
    "dict of splits": (lambda: {"train": TRAIN, "test": TEST}, X),
    "dict of splits in capitals": (lambda: {"Train": TRAIN, "TEST": TEST}, X),
    "some whole numbers": (lambda: ((TOKENS[:40], Y[:40]), (TOKENS[40:] / 1.0, Y[40:])), TOKENS.astype(np.float32)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "samples"), POOLS.values(), ids=POOLS)
def test_one_data_set_equals_its_arrays(make: Callable[[], Any], samples: np.ndarray) -> None:
    plain = from_pool(samples, Y, Partitioning(*PARTITION))
    assert plain.x.numpy().dtype == samples.dtype  # float32, or int64
    given = read(make())
    assert not given.client_indices
    assert equal_data(partitioned(given, Partitioning(*PARTITION)), plain)
    assert read(given) is given
    with_validation = Partitioning(*PARTITION, validation=0.3)
    assert equal_data(partitioned(read(make()), with_validation), from_pool(samples, Y, with_validation))


def test_a_data_frame_is_accepted_in_the_forms_that_its_message_advises(tmp_path: Path) -> None:
    df = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": TEXTS, "client": np.array(["n", "s"])[Y % 2]})
    features = ["a", "b"]
    assert read((df[features], df["label"])).x.tolist() == X[:, :2].tolist()
    clients = read({name: (own[features], own["label"]) for name, own in df.groupby("client")})
    assert (clients.client_names, clients.names) == (("n", "s"), NAMES)
    df.to_csv(tmp_path / "t.csv", index=False)
    table = pfedlms.data.load_pool(f"file:{tmp_path}/t.csv")
    assert (table.client_names, table.names, table.x.tolist()) == (("n", "s"), NAMES, X[:, :2].tolist())


@pytest.mark.parametrize(("mode", "shape"), [("L", (1, 5, 6)), ("1", (1, 5, 6)), ("P", (3, 5, 6)), ("RGBA", (4, 5, 6))])
def test_images_of_every_mode_with_8_bits_are_read(mode: str, shape: tuple[int, ...]) -> None:
    x = read(([image.convert(mode) for image in images()], Y)).x
    assert x.shape == (60, *shape)
    assert x.dtype == np.float32
    assert 0 <= x.min() < x.max() <= 1


PAIRS = [(TRAIN, TEST), ((X[:20], Y[:20]), (X[20:30], Y[20:30]))]
CLIENTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a tuple of two pairs": (lambda: tuple(PAIRS), ()),
    "splits of tables": (
        lambda: [Tables(zip(("train", "test"), (Table(x=x, y=y) for x, y in pair), strict=True)) for pair in PAIRS], (),
    ),
    "a dict": (lambda: dict(zip(("north", "south"), PAIRS, strict=True)), ("north", "south")),
    "a dict by number": (lambda: {7: {"train": TRAIN, "test": TEST}, 9: PAIRS[1]}, ("7", "9")),
}  # fmt: skip


@pytest.mark.parametrize(("make", "names"), CLIENTS.values(), ids=CLIENTS)
def test_clients_equal_their_arrays(make: Callable[[], Any], names: tuple[str, ...]) -> None:
    given = read(make())
    assert len(given.client_indices) == 2
    data = partitioned(given, Partitioning(*PARTITION))
    assert equal_data(data, from_pairs(PAIRS))
    assert data.client_names == names
    assert equal_data(partitioned(given, Partitioning(*PARTITION, validation=0.3)), from_pairs(PAIRS, 1, 0.3))


SINGLES = [(X[:30], Y[:30]), (X[30:], Y[30:])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SINGLES,
        lambda: [tensors(*own) for own in SINGLES],
        lambda: {"a": Items(*SINGLES[0]), "b": SINGLES[1]},
        lambda: {"a": Table(x=X[:30], y=Y[:30]), "b": Table(x=X[30:], y=Y[30:])},
    ],
)
def test_a_client_with_one_data_set_splits_it_into_train_and_test(make: Callable[[], Any]) -> None:
    """By hand: of 30 samples round(7.5) = 8 are tested, 2 or 3 of each of three classes."""
    data = partitioned(read(make()), Partitioning(*PARTITION))
    assert torch.equal(data.x, torch.from_numpy(X))
    for client in range(2):
        held = sorted([*data.train[client].tolist(), *data.test[client].tolist()])
        assert held == list(range(30 * client, 30 * client + 30))
        assert len(data.test[client]) == 8
        assert set(np.bincount(Y[data.test[client]]).tolist()) <= {2, 3}
    alone = from_pool(*SINGLES[0], Partitioning(1, 0.5, 1))  # everything to one client, then the same split
    assert data.test[0].tolist() == alone.test[0].tolist()
    other = partitioned(read(make()), Partitioning(3, 0.5, 2))
    assert other.test[0].tolist() != data.test[0].tolist()
    with_a_pair = partitioned(read([(TRAIN, TEST), SINGLES[0]]), Partitioning(*PARTITION))
    assert (len(with_a_pair.train[0]), len(with_a_pair.test[1])) == (40, 8)


def test_a_client_with_one_sample_is_named() -> None:
    pool = read({"a": (X[:30], Y[:30]), "b": (X[30:31], Y[30:31])})
    with pytest.raises(DataError, match=r"client 'b': got 1 sample, expected at least 2 .* pair"):
        partitioned(pool, Partitioning(*PARTITION))


ONE_HOT = np.eye(3)[Y]
LABELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "floats": (Y.astype(np.float64), ()),
    "a column": (Y[:, None], ()),
    "rows of one": (list(torch.from_numpy(Y[:, None])), ()),
    "objects": (Y.astype(object), ()),
    "one-hot": (ONE_HOT, ()),
    "one-hot as lists": (ONE_HOT.astype(int).tolist(), ()),
    "from 1": (Y + 1, ("1", "2", "3")),
    "any numbers": (np.array([-7, 40, 10**12])[Y], ("-7", "40", "1000000000000")),
    "codes with a 0": (np.array([0, 5000, 90000])[Y], ("0", "5000", "90000")),
    "texts": (TEXTS, NAMES),
    "texts that spell one number": (np.array(["+1", "01", "1"])[Y], ("+1", "01", "1")),
    "bytes": (np.char.encode(TEXTS), NAMES),
}


@pytest.mark.parametrize(("labels", "names"), LABELS.values(), ids=LABELS)
def test_labels_of_any_kind_become_class_numbers_with_names(labels: Any, names: tuple[str, ...]) -> None:
    data = partitioned(read((X, labels)), Partitioning(*PARTITION))
    assert equal_data(data, from_pool(X, Y, Partitioning(*PARTITION)))
    assert data.names == names
    differs = data.fingerprint != from_pool(X, Y, Partitioning(*PARTITION)).fingerprint
    assert differs == bool(names)


@pytest.mark.parametrize(
    ("labels", "numbers", "classes", "names"),
    [
        (Y > 0, Y > 0, 2, ("False", "True")),
        ([0, 4] * 30, [0, 4] * 30, 5, ()),
        ([0, 2, 999] * 20, [0, 2, 999] * 20, 1000, ()),
        (np.eye(5)[Y + 1], Y + 1, 5, ()),
    ],
    ids=["booleans", "a gap", "a large gap", "one-hot"],
)
def test_classes_without_samples_are_counted(labels: Any, numbers: Any, classes: int, names: tuple[str, ...]) -> None:
    pool = read((X, labels))
    assert pool.y.tolist() == list(numbers)
    assert (pool.classes, pool.names) == (classes, names)


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        ([Y + 1], 0),
        ([np.array([0, 5000, 90000])[Y]], 0),
        ([Y, -Y - 1], 0),
        ([-Y - 1, Y], 0),
        ([Y, Y + 1.5], 0),
        ([Y, Y + 7], 10),
        ([Y > 0], 2),
        ([TEXTS], 3),
    ],
    ids=["from 1", "large", "negative last", "negative first", "floats last", "class numbers", "booleans", "names"],
)
def test_a_loss_of_its_own_gets_whole_numbers_as_they_are(targets: list[Any], classes: int) -> None:
    """They may be numbers to be predicted: 1 to 5 stars must not become 0 to 4."""
    pool = read([(X, own) for own in targets], any_targets=True)
    assert pool.classes == classes
    if np.asarray(targets[0]).dtype.kind != "U":
        assert pool.y.tolist() == np.concatenate(targets).tolist()


def test_whole_numbers_that_are_objects_are_not_renumbered_either() -> None:
    assert read([(X, (Y + 1).astype(object))], any_targets=True).y.tolist() == (Y + 1).tolist()


def test_classes_are_numbered_over_all_clients() -> None:
    """One client has cats and eels, the other only dogs."""
    first, second = Y != 1, Y == 1
    data = partitioned(read({"a": (X[first], TEXTS[first]), "b": (X[second], TEXTS[second])}), Partitioning(*PARTITION))
    assert data.names == NAMES
    held = [np.unique(data.y[np.concatenate([data.train[k], data.test[k]])]).tolist() for k in range(2)]
    assert held == [[0, 2], [1]]


NAMED: dict[str, Callable[[], Any]] = {
    "ClassLabel": lambda: Table(NAMES, x=X, label=Y.tolist()),
    "torchvision": lambda: Items(X, Y, list(NAMES)),
    "a Subset of torchvision's": lambda: Subset(Subset(Items(X, Y, list(NAMES)), range(50)), range(40)),
}


@pytest.mark.parametrize("make", NAMED.values(), ids=NAMED)
def test_class_names_of_a_data_set_are_used(make: Callable[[], Any]) -> None:
    pool = read(make())
    assert pool.names == NAMES
    assert pool.y.tolist() == Y[: len(pool.y)].tolist()
    missing = read(Table((*NAMES, "fox"), x=X[Y > 0], label=Y[Y > 0]))  # neither the first nor the last occurs
    assert (missing.classes, missing.names, set(missing.y.tolist())) == (4, (*NAMES, "fox"), {1, 2})
    changed = Items(X, Y, list(NAMES))
    changed.target_transform = lambda label: label
    assert read(changed).names == ()


def test_the_fingerprint_differs_for_whole_numbers_and_is_stable_for_floats() -> None:
    whole = partitioned(read((TOKENS, Y)), Partitioning(*PARTITION))
    floats = partitioned(read((TOKENS.astype(np.float32), Y)), Partitioning(*PARTITION))
    assert whole.fingerprint != floats.fingerprint
    # By hand, as checkpoints of the previous version have it.
    digest = hashlib.sha256(str((floats.x.shape, 3)).encode())
    for part in (floats.x.numpy(), floats.y.numpy(), *floats.train, *floats.test):
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    assert floats.fingerprint == digest.hexdigest()


RAGGED = [list(range(3 + place % 2)) for place in range(60)]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DataLoader": (lambda: DataLoader(tensors(X, Y)), "data: got an object of type DataLoader, .* loader.dataset"),
    "generator": (lambda: ((x, y) for x, y in zip(X, Y, strict=True)), "data: got an object of type generator"),
    "array": (lambda: X, r"data: got one ndarray of shape \(60, 4\), expected samples and labels \(x, y\)"),
    "texts by client": (lambda: {"a": "to be", "b": "or not"}, "client 'a': got an object .* pfedlms.data.texts"),
    "DataFrame": (
        lambda: pandas.DataFrame({"a": X[:, 0], "label": Y}),
        r"data: got one DataFrame of shape \(60, 2\), .* \(df\[FEATURES\], df\[LABEL\]\) of a table",
    ),
    "nothing": (list, "data: got a list of 0, expected"),
    "three data sets": (lambda: (TRAIN, TEST, TEST), "data: got a tuple of 3, .* or a list or dict of clients"),
    "Dataset and labels": (lambda: (tensors(X, Y), Y), "got a tuple of 2, expected"),
    "client of three": (lambda: [(TRAIN, TEST, TEST)], "client 0: got a tuple of 3, .* each with one or two"),
    "parts by name": (lambda: [({"a": X, "b": X}, Y)], "client 0 train: got a dict of 2"),
    "parts": (lambda: ((X, X), Y), "data: got 2 samples and 60 labels, expected as many of each"),
    "items of parts": (lambda: Items([{"a": x} for x in X], Y), "data: got samples .* object, expected an array"),
    "items of three": (lambda: tensors(X, X, Y), "item 0 is a tuple of 3, .* one tensor, .* flatten several parts"),
    "no samples": (lambda: (X[:0], Y[:0]), "data: got no samples; leave out clients"),
    "unlike clients": (lambda: {"a": TRAIN, "b": (TOKENS, Y)}, r"client 'b': got samples of shape \(7,\)"),
    "ragged": (lambda: (RAGGED, Y), "data: samples must be arrays of numbers, all of one shape .* pad, cut or resize"),
    "text": (lambda: (TEXTS.tolist(), Y), "got samples of .* type <U3, .* text into token ids"),
    "columns of two kinds": (
        lambda: (pandas.DataFrame({"a": X[:, 0], "b": TEXTS}), Y),
        r"type object, expected an array of numbers .*pandas\.get_dummies\(df\)\.astype\('float32'\)",
    ),
    "sparse matrix": (lambda: (csr_matrix(X), Y), r"got samples of shape \(\) .* a sparse matrix into toarray\(\)"),
    "train beside no split": (lambda: {"train": TRAIN, "bus": TEST}, "a dict with train beside 'bus', expected train"),
    "NaN": (lambda: (X * np.nan, Y), "data: samples hold NaN or infinite values; clean them first"),
    "images of 16 bits": (
        lambda: ([Image.fromarray(pixels[..., 0].astype(np.uint16)) for pixels in PIXELS], Y),
        r"data: samples: got an image of mode I;16, expected 8 bits .* np\.float32\(image\) / 65535",
    ),
    "masked samples": (lambda: (np.ma.masked_less(X, 0), Y), r"data: samples: got a masked array, .*\.filled\(VALUE\)"),
    "masked labels": (lambda: (X, np.ma.masked_equal(Y, 1)), "data: labels: got a masked array"),
    "beyond float32": (lambda: (X.astype(np.float64) * 1e300, Y), "NaN or infinite values"),
    "columns of no name": (lambda: Table(a=X, b=X, label=Y), r"columns a, b, label, .*\(ds\['x'\], ds\['y'\]\)"),
    "unknown labels": (
        lambda: Tables(train=Table(NAMES, x=X, label=Y), rest=Table(NAMES, x=X, label=Y * 0 - 1)),
        "data, rest: got label -1, expected 0 to 2; leave samples without a label out",
    ),
    "other classes": (
        lambda: [Table(NAMES, x=X, label=Y), Table(NAMES[::-1], x=X, label=Y)],
        "client 1: got other classes than client 0",
    ),
    "labels between classes": (lambda: (X, Y + 0.5), r"labels such as 0\.5, .* need a loss, which is given in"),
    "missing labels": (lambda: (X, np.where(Y == 1, np.nan, Y)), "20 labels are missing, the first in sample 1"),
    "labels beyond floats": (lambda: (X, Y + 1e19), r"labels such as 1e\+19, expected class numbers"),
    "a list of masked rows": (lambda: ([np.ma.masked_less(x, 0) for x in X], Y), "data: samples: got a masked array"),
    "labels of several kinds": (lambda: (X, np.array([1, "a", 2.5] * 20, dtype=object)), "types float, int, str"),
    "texts and numbers": (lambda: [(X, TEXTS), (X, Y)], "client 1: got labels of type int64 .* those of client 0, <U3"),
    "one-hot of two widths": (
        lambda: [(X, np.eye(3)[Y]), (X, np.eye(4)[Y])], r"client 1: .* shape \(60, 4\), .* and \(60, 3\)",
    ),
    "swapped": (lambda: (Y, X), r"labels of shape \(60, 4\) .* samples come first, \(x, y\)"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_data_are_refused_with_a_message_of_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(make())
    assert "\n" not in str(caught.value)


def test_a_single_class_is_refused_in_every_kind_of_data(tmp_path: Path) -> None:
    """But a single client may have one class: other clients may have the others."""
    np.savez(tmp_path / "t.npz", x=X, y=Y * 0 + 5)
    for data in ((X, Y * 0 + 5), [(X[:30], Y[:30] * 0 + 5), (X[30:], Y[30:] * 0 + 5)], f"file:{tmp_path}/t.npz"):
        with pytest.raises(DataError, match="data: got labels that are all 5, expected two classes or more"):
            pfedlms.run(data, lambda: nn.Linear(4, 3), **QUICK | {"clients": 2})
    assert read((X, Y * 0)).classes == 1


def test_another_number_of_clients_than_the_data_have_is_refused() -> None:
    with pytest.raises(PfedlmsError, match="clients: got 5, but data has 2 clients; leave it out"):
        pfedlms.run(PAIRS, lambda: nn.Linear(4, 3), clients=5)


QUICK: dict[str, Any] = {"rounds": 2, "clients": 3, "local_steps": 2, "batch_size": 8, "threads": 1}


def test_whole_numbers_become_floats_for_a_model_without_embedding() -> None:
    counts = np.random.default_rng(2).integers(0, 5, (60, 4))
    whole, floats = (pfedlms.run((x, Y), lambda: nn.Linear(4, 3), **QUICK) for x in (counts, counts.astype(np.float32)))
    assert whole.federation.data.x.dtype == torch.float32
    drop = {"seconds": None}
    assert [record | drop for record in whole.metrics] == [record | drop for record in floats.metrics]
    assert whole.federation.data.fingerprint == floats.federation.data.fingerprint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(28, 3)),
            r"whole numbers from 0 to 49 .*index out of range.* at least 50 entries",
        ),
        (lambda: nn.Sequential(nn.Embedding(50, 4), nn.Linear(7, 3)), r"fails on samples of shape \(7,\)"),
        (lambda: nn.Linear(9, 3), r"as floats: .*shapes cannot be multiplied"),
    ],
)
def test_a_model_that_cannot_take_the_samples_is_refused_before_training(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pfedlms.run((TOKENS, Y), make, **QUICK)


def test_the_largest_number_at_every_position_is_checked() -> None:
    """Every position has its own embedding; one sample has a number that is too large at one position."""

    class EmbeddingPerPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.head = nn.ModuleList(nn.Embedding(n, 2) for n in (100, 5)), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([table(x[:, place]) for place, table in enumerate(self.tables)], dim=1))

    x = np.stack([np.arange(60), np.arange(60) % 5], axis=1)
    assert pfedlms.run((x, Y), EmbeddingPerPosition, **QUICK).federation.data.x.dtype == torch.int64
    x[17, 1] = 5
    with pytest.raises(UsageError, match="index out of range"):
        pfedlms.run((x, Y), EmbeddingPerPosition, **QUICK)


def test_token_ids_are_not_augmented() -> None:
    tokens = RANDOM.integers(0, 50, (60, 1, 3, 3))
    factory = lambda: nn.Sequential(nn.Flatten(), nn.Embedding(50, 2), nn.Flatten(), nn.Linear(18, 3))  # noqa: E731
    with pytest.raises(UsageError, match=r"train.augment: .* type torch.int64, expected images .*floats"):
        pfedlms.run((tokens, Y), factory, augment="flip", **QUICK)
