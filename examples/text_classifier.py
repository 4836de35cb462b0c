"""Text: an embedding and an LSTM on sentences made up here. A client has met many words seldom or never, so what others
know of a word has to reach it through a sketch.

python examples/text_classifier.py [SEEDS [ROUNDS]]
"""

from __future__ import annotations

import sys

import numpy as np
from torch import Tensor, nn

import pfedlms

TOPICS = ("food", "music", "sport", "travel")
LENGTH = 12


def sentences(count: int = 1200) -> tuple[list[str], list[str]]:
    """Texts of made-up words and their topics: two words in five are of the topic, all others are common."""
    random = np.random.default_rng(0)
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    words = list(dict.fromkeys("".join(random.choice(syllables, 3)) for _ in range(500)))
    own, common = np.reshape(words[:240], (len(TOPICS), 60)), words[240:440]
    topics = random.integers(len(TOPICS), size=count)
    texts = []
    for topic in topics:
        length = random.integers(8, LENGTH + 1)
        texts.append(" ".join(random.choice(own[topic] if random.random() < 0.4 else common) for _ in range(length)))
    return texts, [TOPICS[topic] for topic in topics]


def token_ids(texts: list[str]) -> tuple[np.ndarray, int]:
    """Whole numbers `[n, LENGTH]`, 0 after a text's end, and how many of them there are."""
    split = [text.split() for text in texts]
    number = {word: place for place, word in enumerate(sorted(set().union(*split)), start=1)}
    ids = [[number[word] for word in words] + [0] * (LENGTH - len(words)) for words in split]
    return np.array(ids), len(number) + 1


class Reader(nn.Module):
    """Predicts the topic from the mean of an LSTM's outputs."""

    def __init__(self, words: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, len(TOPICS))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0].mean(dim=1))


def main(seeds: int = 1, rounds: int = 30) -> None:
    texts, topics = sentences()
    ids, words = token_ids(texts)
    print(
        pfedlms.compare(
            (ids, topics), lambda: Reader(words), methods=["local", "fedavg", ("pfedlms", {"strength": 0.003}),
            "sketchvote"], seeds=seeds, clients=8, alpha=1.0, rounds=rounds, local_steps=5, batch_size=16,
            optimizer="adamw", learning_rate=0.03, evaluate_every=3,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
