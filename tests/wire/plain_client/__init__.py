"""A second implementation of docs/protocol.md, written from that page alone: plain Python, standard library only.

It is slow and short on purpose. Each file implements one or a few sections of the page.
"""
# ruff: noqa: F401 - all names, in one place

from __future__ import annotations

from plain_client.averages import add_sparse, average, server_input, stc_fields, ternary
from plain_client.fields import (
    Count,
    Floats,
    Mask,
    MaskedBytes,
    MaskedRows,
    Places,
    Positions,
    Signs,
    Symbols,
    read_payload,
    write_payload,
)
from plain_client.frames import (
    SERVER,
    Receiver,
    accept_stream,
    common_lines,
    digest_of,
    digest_text,
    write_frame,
    zsign_lines,
)
from plain_client.numbers import allocated_sizes, f32, fnv1a, padded, row, signs, sketch_size, stream, word
from plain_client.packing import Refused, block_size, pack, unpack, width
from plain_client.pfedlms import Client, Run, Server
from plain_client.quantising import lloyd_max_boundaries, pool, quantiles, statistics, symbols_of, thresholds_of, vote
from plain_client.sketching import sketch, transform
from plain_client.sketchvote import (
    DOWN,
    MODEL,
    UP,
    VoteClient,
    VoteRun,
    VoteServer,
    model_digest,
    weighted_median,
)
