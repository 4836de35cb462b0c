"""`pfedlms deploy upgrade`: a folder of an older version gets the scripts of this one and keeps what is its owner's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from pfedlms.errors import UsageError
from pfedlms.experiment.config import as_toml
from pfedlms.flower.approval import declared
from pfedlms.flower.folder import OWNED, environment, made, pyproject, write

BEFORE = "before-upgrade"


def upgrade(folder: Path) -> list[str]:
    """Write all files that are not the owner's own; old ones go to a folder of their own. Says what is left to do."""
    named = environment(folder)
    if "SERVER" not in named or "PORT" not in named:
        raise UsageError(
            f"{folder / 'environment.sh'}: got no SERVER and PORT, expected those of `pfedlms deploy init`"
        )
    named.setdefault("LINK_PORT", str(int(named["PORT"]) + 1))  # the gate takes the port that nodes know
    nodes = len(list(folder.glob("node-*.sh")))
    texts = made(folder, nodes, named["SERVER"], int(named["PORT"]), int(named["LINK_PORT"]))
    for name in OWNED:
        texts.pop(name, None)
    for node in range(nodes):
        texts[f"node-{node}.sh"] = _with_own_config(texts[f"node-{node}.sh"], folder / f"node-{node}.sh")
    texts["app/pyproject.toml"] = _with_own_settings(folder)
    for name in texts:
        if (folder / name).exists():
            kept = folder / BEFORE / name
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(folder / name, kept)
    write(folder, texts)
    for path in [folder, *(each for each in folder.rglob("*") if each.is_dir())]:
        path.chmod(0o700)
    for path in (*folder.glob("state/*"), *folder.glob("superlink.db*"), *folder.glob("run/**/*")):
        path.chmod(path.stat().st_mode & 0o700)
    return [
        f"{len(texts)} files are of this version; those before are in {folder / BEFORE}",
        "server: end superlink.sh, ./certificates.sh, ./keys.sh server; then ./superlink.sh, ./gate.sh, ./register.sh",
        f"server: nodes reach port {named['PORT']} of the gate; port {named['LINK_PORT']} must not be open to others",
        "each node: update pfedlms, `pfedlms deploy upgrade` there, copy app/ and keys/server.pub from the server, "
        "./keys.sh K, ./approve.sh, and start node-K.sh again",
    ]


def _with_own_config(text: str, before: Path) -> str:
    """A node's script with the --node-config that its owner had written."""
    old = before.read_text(encoding="utf-8")
    found = re.search(r'--node-config "(partition-id=.*?)" "\$@"', old) or re.search(r'^config="(.*)"$', old, re.M)
    if found is None:
        return text
    own = found[1] if "keep=" in found[1] else f"{found[1]} keep=90"
    return re.sub(r'^config=".*"$', lambda _: f'config="{own}"', text, count=1, flags=re.M)


def _with_own_settings(folder: Path) -> str:
    """The app's description with all keys of this version and the values that the folder had."""
    had = declared((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    lines, section = list[str](), ""
    for line in pyproject(folder.resolve()).splitlines():
        if line.startswith("["):
            section = line.strip("[]").removeprefix("tool.flwr.app.config.")
        key = line.partition(" = ")[0]
        value = had.get(f"{section}.{key}", "")
        lines.append(f"{key} = {as_toml(value)}" if value != "" and " = " in line and line[0] not in "#[" else line)
    return "\n".join(lines) + "\n"
