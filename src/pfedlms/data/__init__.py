"""Data sets, their partition over clients, and the order of mini-batches."""

from pfedlms.data.batches import batch_positions
from pfedlms.data.federated import FederatedData, from_pairs, from_pool
from pfedlms.data.intake import Given, read
from pfedlms.data.pool import Pool
from pfedlms.data.schemes import Partitioning
from pfedlms.data.sources import DATASETS, load_dataset, load_pool

__all__ = [
    "DATASETS",
    "FederatedData",
    "Given",
    "Partitioning",
    "Pool",
    "batch_positions",
    "from_pairs",
    "from_pool",
    "load_dataset",
    "load_pool",
    "read",
]
