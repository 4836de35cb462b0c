"""Files with samples, labels and perhaps clients: arrays, CSV, Parquet and JSON, correct and broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from pfedlms.data import Pool, load_pool
from pfedlms.data.file import read_columns, texts_by_client
from pfedlms.errors import DataError, DataWarning


def csv_file(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    path.with_suffix(".csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path.with_suffix(".csv")


def parquet_file(path: Path, columns: dict[str, list[Any]]) -> Path:
    parquet.write_table(pa.table(columns), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


Write = Callable[[Path, dict[str, list[Any]]], Path]
csv_and_parquet = pytest.mark.parametrize("write", [csv_file, parquet_file])
TABLE: dict[str, list[Any]] = {
    "height": [1.5, 2.0, -3.25],
    "label": ["cat", "dog", "cat"],
    "weight": [10, 20, 30],
    "client": ["eva", "bob", "eva"],
}


def read(path: Path, **settings: str) -> Pool:
    return load_pool(f"file:{path}", None, **settings)


@csv_and_parquet
def test_columns_are_read_as_features_labels_and_clients(write: Write, tmp_path: Path) -> None:
    pool = read(write(tmp_path / "t", TABLE))
    assert pool.x.tolist() == [[1.5, 10], [2, 20], [-3.25, 30]]
    assert pool.x.dtype == np.float32
    assert pool.y.tolist() == [0, 1, 0]
    assert pool.names == ("cat", "dog")
    assert (pool.owner.tolist(), pool.client_names) == ([1, 0, 1], ("bob", "eva"))
    unowned = read(write(tmp_path / "u", {name: column for name, column in TABLE.items() if name != "client"}))
    assert (unowned.x.shape, unowned.owner, unowned.client_names) == ((3, 2), None, ())


@csv_and_parquet
@pytest.mark.parametrize("label", ["label", "class", "target", "y", "Label", "CLASS"])
@pytest.mark.parametrize("client", ["client", "user", "client_id", "User"])
def test_columns_are_found_by_their_usual_names(write: Write, label: str, client: str, tmp_path: Path) -> None:
    pool = read(write(tmp_path / "t", {"a": [1, 2], label: [0, 1], client: [5, 3]}))
    assert (pool.x.shape, pool.names, pool.client_names) == ((2, 1), ("0", "1"), ("3", "5"))


@csv_and_parquet
def test_label_and_client_columns_can_be_named(write: Write, tmp_path: Path) -> None:
    columns = {"y": [1, 2], "species": ["b", "a"], "site": [2, 1], "user": [7, 8]}
    with (
        pytest.warns(DataWarning, match=r"data\.owner_column is 'site', so the column 'user' is a feature"),
        pytest.warns(DataWarning, match=r"data\.label_column is 'species', so the column 'y' is a feature"),
    ):
        pool = read(write(tmp_path / "t", columns), label="species", client="site")
    assert pool.x.tolist() == [[1, 7], [2, 8]]
    assert (pool.names, pool.client_names) == (("a", "b"), ("1", "2"))


@pytest.mark.parametrize("index", ["", "Unnamed: 0", "__index_level_0__"])
@csv_and_parquet
def test_a_column_of_row_numbers_is_left_out(write: Write, index: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t", {index: [0, 1, 2], **TABLE})
    with pytest.warns(DataWarning, match=f"the column '{index}' is left out, as it numbers rows"):
        assert read(path).x.tolist() == [[1.5, 10], [2, 20], [-3.25, 30]]
    without_clients = write(tmp_path / "v", {index: [0, 1, 2], "a": [1, 2, 3], "label": [0, 1, 0]})
    with pytest.warns(DataWarning, match="is left out"):
        assert read(without_clients).x.shape == (3, 1)
    named = write(tmp_path / "u", {"a": [0, 1, 2], "Unnamed: 0": [5, 6, 5]})
    assert read(named, label="Unnamed: 0").names == ("5", "6")


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        ([10, 9, 10], [1, 0, 1], ("9", "10")),  # numbers in their order, not that of text
        (["10", "9", "10"], [1, 0, 1], ("9", "10")),
        ([1.0, 3.0, 2.0], [0, 2, 1], ("1", "2", "3")),
        (["01", "2", "1"], [0, 2, 1], ("01", "1", "2")),  # as they are spelled: nothing is merged
        (["1e1", "10", "+1"], [2, 1, 0], ("+1", "10", "1e1")),
        (["١", "1", " 1"], [2, 1, 0], (" 1", "1", "١")),
        ([True, False, True], [1, 0, 1], ("False", "True")),
        (["b", "10", "9"], [2, 0, 1], ("10", "9", "b")),
        ([2**62 + 1, 2**62, 1], [2, 1, 0], ("1", str(2**62), str(2**62 + 1))),  # equal as floats
    ],
)
@csv_and_parquet
def test_classes_are_the_values_in_the_label_column(
    write: Write, labels: list[Any], numbers: list[int], names: tuple[str, ...], tmp_path: Path
) -> None:
    pool = read(write(tmp_path / "t", {"a": [0, 0, 0], "label": labels}))
    assert pool.y.tolist() == numbers
    assert pool.y.dtype == np.int64
    assert pool.names == names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "a;b;label\n1;2.5;x\n-3;4e2;y\n"),
        ("t.csv", "a\tb\tlabel\n1\t2.5\tx\n-3\t4e2\ty\n"),
        ("t.tsv", "a, in m, in all\tb, c\tlabel\n1\t2.5\tx\n-3\t400\ty\n"),
        ("t.csv", "\ufefflabel,a,b\r\nx,1,2.5\r\ny,-3,4e2\r\n"),
        ("t.csv", '"a"," b ",label\n1, 2.5,"x"\n\n-3,4e2,y'),
    ],
    ids=["semicolons", "tabs", "tabs and commas", "as spreadsheets write it", "quotes, spaces and an empty line"],
)
def test_csv_is_read_with_any_delimiter_and_quotes(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    pool = read(tmp_path / name)
    assert pool.x.tolist() == [[1, 2.5], [-3, 400]]
    assert pool.names == ("x", "y")


def test_labels_that_look_like_floats_are_numbers_in_csv_only(tmp_path: Path) -> None:
    """A CSV has no types: 2.0 is the number 2 and 1.50 is no label. In a column of text, 2.0 is a text."""
    columns: dict[str, list[Any]] = {"a": [0, 0, 0], "label": ["10.0", "3.0", "2.0"]}
    assert read(csv_file(tmp_path / "t", columns)).names == ("2", "3", "10")
    assert read(parquet_file(tmp_path / "t", columns)).names == ("10.0", "2.0", "3.0")
    with pytest.raises(DataError, match=r"labels such as 1\.5, .* need a loss"):
        read(csv_file(tmp_path / "t", columns | {"label": ["1.50", "3", "2"]}))


@csv_and_parquet
def test_client_names_are_used_as_they_are_spelled(write: Write, tmp_path: Path) -> None:
    for names in (["007", "7", "1.1", "1.10"], ["1_0", "10", "007", "7"]):
        path = write(tmp_path / "t", {"a": [1, 2, 3, 4], "client": names, "label": [0, 1, 0, 1]})
        assert set(read(path).client_names) == set(names)
    columns = {"a": [1, 2, 3], "client": ["10.0", "2.0", "1.0"], "label": [0, 1, 0]}
    assert read(csv_file(tmp_path / "v", columns)).client_names == ("1", "2", "10")  # as typed floats are
    (tmp_path / "u.csv").write_text("client,text\n007,some words\n7,other words\n")
    assert set(texts_by_client(tmp_path / "u.csv", read_columns(tmp_path / "u.csv"))) == {"007", "7"}


@pytest.mark.parametrize(
    ("samples", "labels", "client", "kind"),
    [
        ("x", "y", "client", np.float32),
        ("samples", "labels", "clients", np.int64),
        ("images", "label", "client", np.int64),
    ],
)
def test_arrays_have_samples_labels_and_clients(
    samples: str, labels: str, client: str, kind: type, tmp_path: Path
) -> None:
    """Whole numbers stay what they are; labels may be a column, and other arrays are left alone."""
    x = np.arange(12, dtype=kind).reshape(4, 3) + 2**30
    others = {client: np.array(["q", "p", "q", "q"]), "note": np.array("of others"), "scale": np.ones(3)}
    np.savez(tmp_path / "t.npz", **{samples: x, labels: np.array([[2], [1], [2], [1]]), **others})
    pool = read(tmp_path / "t.npz")
    assert pool.x.dtype == kind
    assert pool.x.tolist() == x.tolist()
    assert (pool.y.tolist(), pool.names) == ([1, 0, 1, 0], ("1", "2"))
    assert (pool.owner.tolist(), pool.client_names) == ([1, 0, 1, 1], ("p", "q"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5, 4), (2, 1, 5, 4)),
        ((2, 5, 4, 3), (2, 3, 5, 4)),
        ((2, 5, 6, 4), (2, 4, 5, 6)),
        ((2, 3, 5, 4), (2, 3, 5, 4)),
        ((2, 1, 8, 3), (2, 1, 8, 3)),
    ],
)
def test_bytes_are_normalised_as_images(shape: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path) -> None:
    """One all 50, the other all 150: −1 and 1, channels first."""
    images = np.full(shape, 50, dtype=np.uint8)
    images[1] = 150
    np.savez(tmp_path / "t.npz", x=images, y=np.array([0, 1]))
    x = read(tmp_path / "t.npz").x
    assert x.shape == expected
    assert x[0] == pytest.approx(-1, abs=1e-4)
    assert x[1] == pytest.approx(1, abs=1e-4)


LEAF = {"users": ["b", "a"], "num_samples": [2, 1],
        "user_data": {"b": {"x": [[1, 2], [3, 4]], "y": [7, 5]}, "a": {"x": [[5, 6]], "y": [7]}}}  # fmt: skip
LINES = [{"client": user, "x": x, "y": y} for user, own in LEAF["user_data"].items()
         for x, y in zip(own["x"], own["y"], strict=True)]  # fmt: skip


@pytest.mark.parametrize("name", ["t.json", "t.jsonl", "t.jsonl.gz", "t.parquet"])
def test_json_and_nested_parquet_are_read_with_their_clients(name: str, tmp_path: Path) -> None:
    """The same samples as LEAF has them, as lines, and as a table with a column of lists; whole numbers stay whole."""
    lines = "\n".join(map(json.dumps, LINES)) + "\n\n"
    match name:
        case "t.parquet":
            parquet.write_table(pa.Table.from_pylist(LINES), tmp_path / name)
        case "t.json":
            (tmp_path / name).write_text(json.dumps(LEAF))
        case _:
            (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    pool = read(tmp_path / name)
    assert pool.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert pool.x.dtype == np.int64
    assert (pool.y.tolist(), pool.names) == ([1, 0, 1], ("5", "7"))
    assert (pool.owner.tolist(), pool.client_names) == ([1, 1, 0], ("a", "b"))


def test_users_of_leaf_may_be_numbers(tmp_path: Path) -> None:
    """JSON has them as numbers in a list, and as texts where they are keys."""
    users = {user: {"x": [[user]], "y": [user]} for user in (3, 8)}
    (tmp_path / "t.json").write_text(json.dumps({"users": list(users), "user_data": users}))
    assert read(tmp_path / "t.json").client_names == ("3", "8")


WRONG: dict[str, tuple[dict[str, list[Any]], dict[str, str], str]] = {
    "no label": ({"a": [1], "b": [2]}, {}, r"got a, b, expected one called label or .* data.label_column=COLUMN"),
    "no such label": ({"a": [1], "kind": [2]}, {"label": "kinf"}, r"data.label_column: got 'kinf'.*did you mean kind"),
    "no features": ({"label": [1], "client": [2]}, {}, r"got 0 features and columns of \[1\] rows"),
    "words as features": (
        {"a": [1, 2], "town": ["Ulm", "Bonn"], "y": [0, 1]}, {},
        r"column 'town', sample 0 \(from 0\): got 'Ulm', expected a finite number",
    ),
    "nothing a number": ({"a": [1.0, float("nan")], "y": [0, 1]}, {}, r"column 'a', sample 1 \(from 0\): got .*nan"),
}  # fmt: skip


@csv_and_parquet
@pytest.mark.parametrize(("columns", "settings", "message"), WRONG.values(), ids=WRONG)
def test_wrong_columns_are_named(
    write: Write, columns: dict[str, list[Any]], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "t", columns), **settings)


def test_missing_values_are_named(tmp_path: Path) -> None:
    for columns, message in (
        ({"a": [1, None], "y": [0, 1]}, r"column 'a', sample 1"),
        ({"a": [1, 2], "y": [0, None]}, r"column 'y': 1 label is missing, the first in sample 1 \(from 0\)"),
        ({"a": [1, 2], "y": [0, 1], "client": [None, "a"]}, r"column 'client': 1 client is missing"),
    ):
        with pytest.raises(DataError, match=message):
            read(parquet_file(tmp_path / "t", columns))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 3))}, "got x, expected one called label or .*data.label_column"),
        ({"y": np.zeros(2)}, r"got 0 features and columns of \[2\] rows"),
        ({"data": np.zeros((2, 3)), "y": np.zeros(2)}, r"got 'data' of shape \(2, 3\); samples .* must be called x"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(3)}, r"columns of \[2, 3\] rows, expected as many"),
        ({"x": np.array([{}, {}]), "y": np.zeros(2)}, r"cannot be read \(.*numpy\.array\(objects\.tolist"),
    ],
)
def test_wrong_arrays_are_named(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "t.npz")


LEAF_OF = b'{"user_data": {"a": {"x": %s}}}'
BROKEN = [
    ("t.csv", b"", "expected one called label"),
    ("t.csv", b"a,label\n", r"columns of \[0\] rows"),
    (
        "t.csv",
        b"a,label\n1,2\n1,2,3\n",
        r"cannot be read \(line 3: got 3 values\), expected .* as many values in each line",
    ),
    ("t.csv", b"a,a,label\n1,2,3\n", "two columns have one name: a, a, label"),
    ("t.csv", b"a,label\n1,\xff\xfe\n", "cannot be read .* expected text in UTF-8"),
    ("t.csv", b"a,y\n1,0\n2, \n", "column 'y': 1 label is missing, the first in sample 1"),
    ("t.json", b"{", "cannot be read .* expected user_data with as many x as y"),
    ("t.json", LEAF_OF % b"[[1]]", "cannot be read .KeyError: 'y'."),
    ("t.json", LEAF_OF % b'[[1], [2, 3]], "y": [0, 1]', "column 'x': must be arrays"),
    ("t.json", LEAF_OF % b'[[1], [2]], "y": [0]', "cannot be read .zip"),
    ("t.json", LEAF_OF % b'["good film", "bad"], "y": ["pos", "neg"]', "the y of a text is 'pos'.*, expected"),
    ("t.json", LEAF_OF % b'["to be", "or"], "y": ["t", "n"]', "with 10 tokens, expected 161 or more, for 2 windows"),
    ("t.jsonl", b'{"x": [1], "y": 0}\nnothing\n', "t.jsonl: cannot be read .line 2: got b'nothing'., expected JSON"),
    ("t.jsonl", b'{"x": [1], "y": 0}\n{"x": [1]}\n', "line 2: got .* an object with the same keys"),
    ("t.jsonl", b"\xff\xfe", "line 1: got .*, expected JSON in UTF-8"),
    ("t.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-4], "t.jsonl.gz: cannot be read"),
    ("t.npz", b"PK\x03\x04 half of it", "expected arrays"),
    ("t.parquet", b"PAR1 something else", r"cannot be read \(.*\), expected a whole Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_broken_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_a_missing_file_or_an_unknown_suffix_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"t.csv is no file; file:PATH names one"):
        read(tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"t.xlsx, expected a file that ends in .npz, .csv, .tsv, .parquet, .json"):
        read(tmp_path / "t.xlsx")
