"""All settings but those of methods: one dataclass per section, every key documented where it is defined.

The command line, TOML files, keywords in Python and Flower's run config are derived from them. Choices are looked up
when they are needed, so that `pfedlms --help` does not wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, fields
from typing import Any

from pfedlms.errors import did_you_mean
from pfedlms.report.runs import dataset_title
from pfedlms.settings import CUSTOM, setting
from pfedlms.train_settings import TrainSettings

DEFAULT_METHODS = ("local", "fedavg", "pfedlms", "sketchvote")
"""The methods of a comparison that names none."""
OTHER_NAMES = {
    "method.name": "algorithm algo strategy methods",
    "data.dataset": "data",
    "data.dir": "dir data_dir data_path data_folder directory folder root",
    "data.alpha": "dirichlet beta",
    "data.clients": "num_clients n_clients client users nodes",
    "data.validation": "val val_split",
    "data.window": "seq_len sequence_length block_size",
    "data.newcomers": "held_out unseen",
    "model.name": "arch network net",
    "train.rounds": "num_rounds n_rounds communication_rounds global_rounds",
    "train.participation": "frac fraction fraction_fit join_ratio sample",
    "train.local_steps": "steps iterations",
    "train.local_epochs": "epochs",
    "train.batch_size": "batch bs",
    "train.learning_rate": "lr eta step_size",
    "train.weight_decay": "wd l2",
    "train.schedule": "lr_schedule scheduler",
    "run.seed": "random_seed",
    "run.device": "gpu cuda",
    "run.out": "output output_dir save",
    "run.evaluate_every": "eval_every",
}
"""Settings with the names that other tools have for them."""


def _names_of(what: str) -> Callable[[], list[str]]:
    """A function that looks up the names of data sets, partitions, models or kinds of tokens."""

    def names() -> list[str]:
        from pfedlms.data.partition import SCHEMES
        from pfedlms.data.sources import DATASETS, PATHS
        from pfedlms.data.text import KINDS
        from pfedlms.experiment.plugins import load_plugins
        from pfedlms.models.zoo import MODELS

        load_plugins(methods=False)
        datasets = [*DATASETS, *(f"{kind}:PATH" for kind in PATHS), CUSTOM]
        models = [*MODELS, CUSTOM]
        return {"datasets": datasets, "tokens": [*KINDS], "partitions": ["auto", *SCHEMES], "models": models}[what]

    return names


def _kind_of_path(name: str) -> str:
    from pfedlms.data.sources import suggest_kind

    return suggest_kind(name)


@dataclass(frozen=True)
class DataSection:
    """The data set, and which client holds which part of it."""

    dataset: str = setting(
        "digits", "data set by name (pfedlms datasets), folder:PATH or file:PATH", choices=_names_of("datasets"),
        hint=_kind_of_path,
    )  # fmt: skip
    dir: str = setting("", "folder with the data set's files; empty: the one that PFEDLMS_DATA names")
    image_size: int = setting(
        0, "images of folder:PATH are resized to this many pixels each way; 0: not resized", minimum=0, maximum=4096
    )
    label_column: str = setting("", "column of file:PATH with the class; empty: label, class, target or y")
    owner_column: str = setting(
        "", "column of file:PATH with the client that holds a sample; empty: client, user or client_id, if there is one"
    )
    text_column: str = setting("", "column of file:PATH with text; empty: text, where there is no label column")
    tokens: str = setting(
        "characters",
        "of text: what a token is; a tokenizer is given in Python, by pfedlms.data.texts",
        choices=_names_of("tokens"),
    )
    window: int = setting(80, "of text: tokens of one sample", minimum=1)
    stride: int = setting(0, "of text: tokens from one window to the next; 0: windows do not overlap", minimum=0)
    min_tokens: int = setting(0, "of text: clients with fewer tokens are left out", minimum=0)
    newcomers: float = setting(
        0.0,
        "share of the clients held out of the run; at its end each gets what a new client gets, and is measured before "
        "and after its first local steps; 0: none",
        minimum=0,
        below=1,
    )
    partition: str = setting(
        "auto",
        "which client holds which samples: Dirichlet(α) shares of each class, some classes per client, all alike, "
        "sizes by Dirichlet(α), or as the data say; auto: given where the data say so, else dirichlet",
        choices=_names_of("partitions"),
    )
    alpha: float = setting(
        0.5,
        "α of the Dirichlet partition; small: each client holds few classes (quantity: few clients hold most)",
        above=0,
    )
    classes_per_client: int = setting(2, "classes per client with partition = classes", minimum=1)
    clients: int = setting(
        20, "K, number of clients; given by the data where they name a client for each sample", minimum=1,
        maximum=(1 << 32) - 2,
    )  # fmt: skip
    min_samples: int = setting(10, "smallest number of samples (train and test) of a client", minimum=1)
    validation: float = setting(
        0.0,
        "share of each client's training samples set aside to choose settings by V-acc; they are not trained on and do "
        "not count in N_k; a client with one training sample sets nothing aside; 0: none",
        minimum=0,
        below=1,
    )
    mean: str = setting(
        "",
        "what is subtracted from images, one number per channel, separated by commas; empty: the data set's own, for a "
        "folder the mean of its images; stored when a run starts",
    )
    std: str = setting("", "what images are divided by after that, likewise; x = (raw / scale − mean) / std")
    class_names: str = setting(
        "",
        "where nodes hold data of their own: the names of all classes in order, separated by commas, so that all nodes "
        "number them alike",
    )
    sample_shape: str = setting(
        "", "where nodes hold data of their own: the shape of a sample, 3x32x32 for instance; 64 for rows of 64 numbers"
    )

    @property
    def title(self) -> str:
        """The data set's name; of a path its last part."""
        return dataset_title(self.dataset)


@dataclass(frozen=True)
class ModelSection:
    """What every client trains."""

    name: str = setting("dnn", "model by name (pfedlms models)", choices=_names_of("models"))
    hidden: int = setting(256, "width of the hidden layers of dnn, gru and transformer", minimum=1)
    precision: str = setting(
        "default",
        "default: PyTorch's, convolutions in TF32 on a GPU; bf16: products and convolutions in bfloat16, for GPUs",
        choices=("default", "bf16"),
    )


@dataclass(frozen=True)
class RunSection:
    """How the run is executed and what is kept."""

    seed: int = setting(
        0, "names every random stream: partition, initial weights, batches, sketches", minimum=0, maximum=(1 << 63) - 1
    )
    device: str = setting(
        "auto", "auto takes a GPU where there is one; cuda:N the one of that number, from 0",
        choices=("auto", "cpu", "cuda", "cuda:N"),
    )  # fmt: skip
    threads: int = setting(0, "CPU threads; 0: as many as PyTorch is set to", minimum=0, maximum=1024)
    out: str = setting("", "run directory; empty: a fresh one under runs/")
    evaluate_every: int = setting(1, "rounds between evaluations (the last round is always evaluated)", minimum=1)
    checkpoint_every: int = setting(10, "rounds between checkpoints (the last round always has one)", minimum=1)
    everyone: bool = setting(
        True, "evaluate all clients after the last round; those that took no part in it take its local steps first"
    )
    quorum: float = setting(
        0.5, "share of an exchange's messages that must be valid for the round to continue", minimum=0, maximum=1
    )
    timeout: float = setting(
        600.0, "on nodes: seconds a node has for one trip; a node that needs longer is excluded from it", above=0
    )
    lost: float = setting(
        0.0, "share of messages that are lost, in each direction; for studies of unreliable links", minimum=0, maximum=1
    )
    cohort_size: int = setting(0, "clients stacked together; 0: as many as fit in memory; 1: one by one", minimum=0)
    reference: bool = setting(False, "plain PyTorch, one client after another, for checking; slow")


SECTIONS: dict[str, type[Any]] = {
    "data": DataSection, "model": ModelSection, "train": TrainSettings, "run": RunSection,
}  # fmt: skip
OPTIONS = {
    "method": ("method.name", "NAME"),
    "dataset": ("data.dataset", "NAME"),
    "data-dir": ("data.dir", "DIR"),
    "partition": ("data.partition", "NAME"),
    "alpha": ("data.alpha", "A"),
    "clients": ("data.clients", "K"),
    "validation": ("data.validation", "SHARE"),
    "newcomers": ("data.newcomers", "SHARE"),
    "model": ("model.name", "NAME"),
    "rounds": ("train.rounds", "N"),
    "participation": ("train.participation", "SHARE"),
    "local-steps": ("train.local_steps", "E"),
    "local-epochs": ("train.local_epochs", "N"),
    "batch-size": ("train.batch_size", "N"),
    "learning-rate": ("train.learning_rate", "ETA"),
    "seed": ("run.seed", "N"),
    "device": ("run.device", "NAME"),
    "reference": ("run.reference", ""),
}
"""Options of the command line that stand for a setting: the setting, and the name of its value in the help."""


def short_help(place: str) -> str:
    """The help of an option that stands for a setting: the first part of the setting's description."""
    section, _, key = place.partition(".")
    if section == "method":
        return "method by name (pfedlms methods)"
    declared: Field[Any] = next(field for field in fields(SECTIONS[section]) if field.name == key)
    return str(declared.metadata["help"]).partition(";")[0]


def place_by_other_name(name: str) -> str | None:
    """The setting, `section.key`, that other tools call `name`; None if there is none."""
    name = name.lower().replace("-", "_")
    return next((place for place, names in OTHER_NAMES.items() if name in names.split()), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown key: our setting for what other tools call so, or the nearest of `known`."""
    place = place_by_other_name(name)
    return f"did you mean {place}?" if place else did_you_mean(name, known)
