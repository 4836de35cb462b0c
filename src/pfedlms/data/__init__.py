"""Data sets, their partition over clients, and the order of mini-batches."""

from pfedlms.data.batches import batch_positions
from pfedlms.data.federated import FederatedData, partitioned
from pfedlms.data.intake import from_pairs, from_pool, read, texts
from pfedlms.data.partition import Partitioning
from pfedlms.data.pool import Pool
from pfedlms.data.sources import DATASETS, load_dataset, load_pool
from pfedlms.data.text import Windows

__all__ = [
    "DATASETS",
    "FederatedData",
    "Partitioning",
    "Pool",
    "Windows",
    "batch_positions",
    "from_pairs",
    "from_pool",
    "load_dataset",
    "load_pool",
    "partitioned",
    "read",
    "texts",
]
