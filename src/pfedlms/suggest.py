"""What was probably meant by an option that a command does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pfedlms.errors import did_you_mean

MEANT = {
    "--lr": "--learning-rate",
    "--eta": "--learning-rate",
    "--epochs": "--local-steps",
    "--local-epochs": "--local-steps",
    "--steps": "--local-steps",
    "--iterations": "--local-steps",
    "--num-clients": "--clients",
    "--n-clients": "--clients",
    "--client": "--clients",
    "--users": "--clients",
    "--num-rounds": "--rounds",
    "--communication-rounds": "--rounds",
    "--global-rounds": "--rounds",
    "--frac": "--participation",
    "--fraction": "--participation",
    "--fraction-fit": "--participation",
    "--join-ratio": "--participation",
    "--sample": "--participation",
    "--dirichlet": "--alpha",
    "--beta": "--alpha",
    "--arch": "--model",
    "--network": "--model",
    "--net": "--model",
    "--data": "--dataset",
    "--data-path": "--data-dir",
    "--dir": "--data-dir",
    "--root": "--data-dir",
    "--gpu": "--device",
    "--cuda": "--device",
    "--algorithm": "--method",
    "--algo": "--method",
    "--strategy": "--method",
    "--output": "--out",
    "--output-dir": "--out",
    "--save": "--out",
    "--trials": "--seeds",
    "--repeats": "--seeds",
    "--random-seed": "--seed",
    "--val": "--validation",
    "--silent": "--quiet",
    "--metric": "--by",
}
"""By what others call it."""
_RELATED = (("--method", "--methods"), ("--seed", "--seeds"), ("--client", "--clients"))


def suggestion(option: str, own: Sequence[str], commands: Mapping[str, Sequence[str]]) -> str:
    """A closing sentence for an option that is not among a command's `own`: what is called so elsewhere, a setting of
    that name, the command that has it (`commands`: their options), or the nearest spelling."""
    name = option.partition("=")[0].lower().replace("_", "-")
    meant = [MEANT.get(name, name)]
    meant += [other for pair in _RELATED if meant[0] in pair for other in pair]
    for each in meant:
        if each in own:
            return f"did you mean {each}?"
    if setting := _setting(meant[0].removeprefix("--").replace("-", "_")):
        return f"did you mean --set {setting}=…?" if "--set" in own else f"{setting} is a setting of a run"
    having = [command for command, options in commands.items() if name in options]
    return f"it is an option of {' and '.join(having[:3])}" if having else did_you_mean(name, own)


def _setting(key: str) -> str | None:
    from pfedlms.experiment.config import keys
    from pfedlms.methods import METHODS

    return next((f"{section}.{name}" for section, name in keys(METHODS) if name == key), None)
