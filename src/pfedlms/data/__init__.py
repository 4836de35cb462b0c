"""Who holds what: data sets, their partition over clients, and the order of mini-batches."""

from pfedlms.data.batches import batch_positions
from pfedlms.data.federated import FederatedData, from_pairs, from_pool
from pfedlms.data.partition import partition, split
from pfedlms.data.sources import DATASETS, Dataset, load, load_dataset

__all__ = [
    "DATASETS",
    "Dataset",
    "FederatedData",
    "batch_positions",
    "from_pairs",
    "from_pool",
    "load",
    "load_dataset",
    "partition",
    "split",
]
