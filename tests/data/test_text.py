"""Text as windows of tokens: by hand, from files of every format, and accuracy and perplexity over tokens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import nn

import factories
import pfedlms
from pfedlms.data import Partitioning, Windows, load_pool, partitioned, texts
from pfedlms.data.download import download
from pfedlms.data.text import cut_windows
from pfedlms.errors import DataError, DataWarning, UsageError

LINES = [
    {"client": "eva", "text": "abcab"},
    {"client": "bob", "text": "bbacacabba"},
    {"client": "eva", "text": "cab"},
]
EVA, BOB = "abcab\ncab", "bbacacabba"


def test_windows_and_targets_by_hand() -> None:
    """eva's nine tokens give two windows of four, of which the last needs the ninth as its target."""
    pool = cut_windows({"eva": EVA, "bob": BOB}, Windows(length=4))
    assert pool.names == ("\n", "a", "b", "c", "\ufffd")
    assert pool.classes == 5
    assert pool.x.tolist() == [[1, 2, 3, 1], [2, 0, 3, 1], [2, 2, 1, 3], [1, 3, 1, 2]]
    assert pool.y.tolist() == [[2, 3, 1, 2], [0, 3, 1, 2], [2, 1, 3, 1], [3, 1, 2, 2]]
    assert pool.x.dtype == pool.y.dtype == np.int64
    assert (pool.owner.tolist(), pool.client_names) == ([0, 0, 1, 1], ("eva", "bob"))


def test_bytes_are_tokens_and_unknown_characters_have_one_token() -> None:
    pool = cut_windows({"a": "aé" * 3}, Windows("bytes", length=2))
    assert pool.x.tolist() == [[0x61, 0xC3], [0xA9, 0x61], [0xC3, 0xA9], [0x61, 0xC3]]
    assert (pool.classes, pool.names[0x61]) == (256, "61")
    known = cut_windows({"a": "a?b?b"}, Windows(length=1), names=("a", "b", "\ufffd"))
    assert known.x.ravel().tolist() == [0, 2, 1, 2]


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


IDS = {"encode": lambda text: SimpleNamespace(ids=letters(text)), "get_vocab": lambda: {"x": 0, "z": 2, "w": 3}}


@pytest.mark.parametrize(
    ("tokenizer", "names"),
    [
        (letters, ("0", "1", "2")),
        (SimpleNamespace(encode=letters, vocab_size=4), ("0", "1", "2", "3")),
        (SimpleNamespace(**IDS), ("x", "1", "z", "w")),
    ],
    ids=["function", "encode", "ids"],
)
def test_a_tokenizer_may_be_a_function_or_an_object(tokenizer: Any, names: tuple[str, ...]) -> None:
    given = texts([BOB, BOB[:6]], tokenizer, window=2)
    assert given.x.tolist() == [[1, 1], [0, 2], [0, 2], [0, 1], [1, 1], [0, 2]]
    assert (given.names, given.tokens) == (names, "custom")
    assert [own.tolist() for own in given.client_indices] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("stride", [1, 3, 7, 8, 20])
@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_no_target_is_in_two_splits(stride: int, validation: float) -> None:
    """Each token is its own number, so targets can be compared one by one: the last quarter of windows is tested."""
    given = texts(["x" * 300, "x" * 500], lambda text: range(len(text)), window=8, stride=stride)
    data = partitioned(given, Partitioning(2, 1.0, seed=3, validation=validation))
    for client, held in enumerate(given.client_indices):
        parts = [data.train[client], *(data.validation[client : client + 1]), data.test[client]]
        targets = [set(data.y[own].flatten().tolist()) for own in parts]
        for earlier, later in pairwise(targets):
            assert max(earlier) < min(later)
        assert len(data.test[client]) == round(len(held) / 4)
        dropped = len(held) - sum(map(len, parts))
        assert dropped == (len(parts) - 1) * (-(-8 // stride) - 1)
    few = texts(["x" * 36], lambda text: range(len(text)), window=8, stride=4)  # seven windows
    with pytest.raises(DataError, match=r"client '0': got . windows .* use a larger data.stride"):
        partitioned(few, Partitioning(1, 1.0, 0, validation=0.9))


def test_short_clients_are_left_out_and_text_is_not_partitioned() -> None:
    pool = cut_windows({"a": "ab" * 20, "b": "ab", "c": "ba" * 30}, Windows(length=4, min_tokens=40))
    assert pool.client_names == ("a", "c")
    assert pool.names == ("a", "b", "\ufffd")
    data = partitioned(pool, Partitioning(20, 1.0, 0, min_samples=2))
    assert (data.clients, data.client_names, data.positions, data.outputs) == (2, ("a", "c"), 4, 3)
    with pytest.raises(DataError, match=r"data.partition: got 'iid', but text belongs to its clients"):
        partitioned(pool, Partitioning(2, 1.0, 0, scheme="iid"))


@pytest.mark.parametrize("name", ["t.parquet", "t.json"])
def test_a_file_of_text_is_cut_into_windows(name: str, tmp_path: Path) -> None:
    """As rows, and in LEAF's format: every two characters with the next one."""
    cut = [{"x": [t[i : i + 2] for i in range(len(t) - 2)], "y": list(t[2:])} for t in ("abcab", BOB, "cab")]
    leaf = {"eva": {key: cut[0][key] + cut[2][key] for key in ("x", "y")}, "bob": cut[1]}
    if name == "t.json":
        (tmp_path / name).write_text(json.dumps({"user_data": leaf}))
    else:
        parquet.write_table(pa.Table.from_pylist(LINES), tmp_path / name)
    pool = load_pool(f"file:{tmp_path / name}", windows=Windows(length=4))
    expected = cut_windows({"eva": EVA, "bob": BOB}, Windows(length=4))
    assert (pool.names, pool.client_names) == (expected.names, expected.client_names)
    assert (pool.x.tolist(), pool.y.tolist()) == (expected.x.tolist(), expected.y.tolist())


@pytest.mark.parametrize("stride", [1, 2, 5, 10])
def test_windows_of_leaf_become_the_text_they_were_cut_from(stride: int, tmp_path: Path) -> None:
    """Ten characters each; without an overlap they cannot be joined, and a warning says so."""
    text = "".join(chr(97 + i * i % 26) for i in range(111))
    starts = range(0, 101, stride)
    cut = {"x": [text[i : i + 10] for i in starts], "y": [text[i + 10] for i in starts]}
    (tmp_path / "t.json").write_text(json.dumps({"user_data": {"a": cut}}))
    with pytest.warns(DataWarning) if stride == 10 else nullcontext():
        pool = load_pool(f"file:{tmp_path / 't.json'}", windows=Windows(length=55))
    found = "".join(pool.names[token] for token in pool.x[:2].flatten())
    assert (found == text[:110]) == (stride < 10)


def test_a_text_column_beside_labels_can_be_named(tmp_path: Path) -> None:
    lines = [{"who": "a", "saying": "abab" * 9, "label": 1}, {"who": "b", "saying": "baba" * 9, "label": 0}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pool = load_pool(f"file:{tmp_path / 't.jsonl'}", client="who", text="saying", windows=Windows(length=4))
    assert (pool.client_names, pool.tokens) == (("a", "b"), "characters")


LONG = json.dumps({"client": "a", "text": "ab" * 200})
BROKEN = {
    "no client": ('{"text": "abc"}', {}, "t.jsonl: got text and no column called client or user"),
    "number as text": (f'{LONG}\n{{"client": "b", "text": 3}}', {}, r"t.jsonl, row 1 \(from 0\): got 'b' and 3"),
    "no text": ('{"client": "a", "text": null}', {}, r"t.jsonl, row 0 \(from 0\): got 'a' and None"),
    "no such column": (LONG, {"text": "txt"}, "data.text_column: got 'txt'.*did you mean text"),
    "too short": (
        f'{LONG}\n{{"client": "b", "text": "ab"}}', {}, "got 2 of 2 clients .* with 2 tokens, expected 161 or more"
    ),
    "all too short": (LONG, {"windows": Windows(min_tokens=500)}, "got 0 of 1 clients with data.min_tokens = 500"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "settings", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_of_text_are_named(content: str, settings: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_pool(f"file:{tmp_path / 't.jsonl'}", **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: texts("one text"), "data: got .*, expected the text of each client"),
        (lambda: texts({}), "data: got a dict of 0"),
        (lambda: texts(["ab" * 99], "words"), "data.tokens: got 'words', expected characters or bytes"),
        (lambda: texts(["ab" * 99], lambda text: text), "the tokenizer gave str, expected a list"),
        (lambda: texts(["ab" * 99], lambda text: [-1] * 200), "the tokenizer gave -1 to -1"),
        (lambda: texts(["ab" * 99], stride=-3), "data.window, data.stride: got 80 and -3, expected at least 1 and 0"),
    ],
)
def test_wrong_text_in_python_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()


def test_shakespeare_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    lines = "\n".join(map(json.dumps, LINES))
    (tmp_path / "shakespeare" / "speakers.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pytest.warns(DataWarning, match="got 2 clients that are not the 1,567 published"):
        pool = load_pool("shakespeare", tmp_path, windows=Windows(length=4))
    assert pool.client_names == ("eva", "bob")
    with pytest.raises(DataError, match=r"nobody offers shakespeare for download; put speakers.jsonl.gz"):
        next(download("shakespeare", tmp_path))


def bigrams(tokens: int) -> nn.Module:
    """The next token from the last one alone."""
    return nn.Embedding(tokens, tokens)


def corpus() -> dict[str, str]:
    draw = np.random.default_rng(0)
    return {name: "".join(draw.choice(list(name * 3 + "xyz"), 300)) for name in ("abc", "bcd", "cde", "def")}


def test_accuracy_and_perplexity_are_means_over_tokens(tmp_path: Path) -> None:
    """Against a plain loop over every token of every client, in float64."""
    data = texts(corpus(), window=10)
    run = pfedlms.run(
        data, bigrams(len(data.names)), method="fedavg", rounds=2, local_steps=3, batch_size=4,
        learning_rate=1.0, out=str(tmp_path / "run"), progress=False, validation=0.2,
    )  # fmt: skip
    held = run.federation.data
    right, losses, seen, per_client = 0, 0.0, 0, []
    for client, test in enumerate(held.test):
        table = run.model(client).get_parameter("weight").detach().double()
        own = 0
        for sample in test:
            for token, following in zip(held.x[sample], held.y[sample], strict=True):
                scores = table[token].log_softmax(0)
                own += int(scores.argmax() == following)
                losses -= float(scores[following])
        right, seen = right + own, seen + 10 * len(test)
        per_client.append(100 * own / (10 * len(test)))
    last = run.metrics[-1]
    assert last["p_acc"] == pytest.approx(100 * right / seen, abs=1e-9)
    assert last["client_acc"] == pytest.approx(per_client, abs=1e-9)
    assert last["test_loss"] == pytest.approx(losses / seen, rel=1e-6)
    assert last["perplexity"] == pytest.approx(np.exp(losses / seen), rel=1e-6)
    summary = pfedlms.load(tmp_path / "run").summary
    assert summary["perplexity"]["min"] == min(line["perplexity"] for line in run.metrics)
    assert summary["global_perplexity"]["final"] == last["g_perplexity"]
    assert (summary["tokens"], summary["classes"]) == ("characters", list(data.names))
    run.export(tmp_path / "m.pt", client="bcd")
    about = json.loads((tmp_path / "m.json").read_text())
    assert (about["tokens"], about["classes"], about["shape"]) == ("characters", list(data.names), [10])


def test_a_model_of_images_is_refused_for_text() -> None:
    with pytest.raises(
        UsageError, match=r"got outputs of shape \(5, 8\) for 5 samples, expected \(5, 10, at least 10\)"
    ):
        pfedlms.run(texts(corpus(), window=10), nn.Linear(10, 8), rounds=1, progress=False)


def test_local_steps_and_losses_are_of_the_mean_over_tokens() -> None:
    """The step before round 1 and the `losses` of the worker, compared with autograd in float64."""
    data = partitioned(texts(["abca" * 40, "cabb" * 40], window=6), Partitioning(2, 1.0, seed=3))
    run = factories.federation("local", data, bigrams(4), batch_size=4, local_steps=1, weight_decay=0.0)
    cohort = run._terms.new_cohort((0, 1), data.samples)
    found = run._worker.losses(cohort, cohort.params, 1, 0)
    first, second = (run._worker.plan(cohort, phase)[0, 0] for phase in (0, 1))
    run.start()
    for client, model in run.models():
        table = cohort.params[client].double().view(4, 4).requires_grad_()
        before, within = (
            nn.functional.cross_entropy(table[data.x[own[client]].flatten()], data.y[own[client]].flatten())
            for own in (first, second)
        )
        torch.testing.assert_close(found[client].double(), within.detach(), rtol=1e-5, atol=1e-6)
        stepped = table - 0.1 * torch.autograd.grad(before, table)[0]
        torch.testing.assert_close(model["weight"].double(), stepped.detach(), rtol=1e-5, atol=1e-6)
