"""Starts the apps of runs, on the server and on nodes, in place of Flower's own executor.

    python -m pfedlms.flower.launcher server|node FOLDER HOST:PORT [CERTIFICATES]

It takes tasks of one kind only, with the folder's secret. It passes a task's token in a file, not on a command line;
nobody else can read the file, and it is removed at once. Each app process compares the app's bytes and the run's
settings with the folder's allow-list before anything of the app is installed or executed. Written for flwr 1.41.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from pfedlms.flower import approval, audit

SECRET = "keys/launcher-secret"
AUDIT = "audit/launcher.jsonl"
APPS = {"server": "serverapp", "node": "clientapp"}
"""Flower's names of the apps, by role."""


class Launcher:
    """An executor of Flower that takes tasks of `task_type` only."""

    def __init__(self, role: str, folder: Path, task_type: Any) -> None:
        self._role, self._folder, self._task_type = role, folder, task_type
        self._running: dict[subprocess.Popen[bytes], Path] = {}
        """Processes of apps, with the files of their tokens."""

    def get_eligible_capacity(self, supported_task_types: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        return supported_task_types & {self._task_type}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        return

    def launch(self, spec: Any) -> Any:
        from flwr.supercore.superexec.executor.types import LaunchResult

        descriptor, token = tempfile.mkstemp(prefix="task-")  # readable by this user alone
        with os.fdopen(descriptor, "w") as file:
            file.write(spec.token)
        trust = ["--insecure"] if spec.insecure else ["--root-certificates", str(spec.root_certificates_path)]
        command = [
            sys.executable, "-m", "pfedlms.flower.launcher", f"flwr-{APPS[self._role]}", str(self._folder), token,
            "--runtime-api-address", spec.runtime_api_address, *trust, "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        # The output of a ServerApp is in the run's own log.
        output = subprocess.DEVNULL if spec.suppress_output else None
        try:
            self._running[subprocess.Popen(command, stdout=output, stderr=output)] = Path(token)
        except OSError:
            os.unlink(token)
            raise
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Forget processes that have ended; one that could not start has left its token."""
        for process in [process for process in self._running if process.poll() is not None]:
            self._running.pop(process).unlink(missing_ok=True)

    def close(self) -> None:
        """End a node's apps, so that none outlives its node; the server's apps end by themselves."""
        for process in self._running if self._role == "node" else ():
            process.terminate()


def start(role: str, folder: Path, address: str, root_certificates: str | None = None) -> None:
    """Take tasks until this process is stopped."""
    from flwr.supercore.auth import load_superexec_auth_secret
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.utils import disable_process_dumping

    disable_process_dumping(strict=False)
    launcher = Launcher(role, folder, TaskType.SERVER_APP if role == "server" else TaskType.CLIENT_APP)
    run_superexec.get_executor = lambda *_, **__: launcher
    run_superexec.run_superexec(
        runtime_api_address=address,
        insecure=root_certificates is None,
        root_certificates_path=root_certificates,
        superexec_auth_secret=load_superexec_auth_secret(str(folder / SECRET)),
        parent_pid=os.getppid(),
    )


def run_app(role: str, folder: Path, token: Path, options: list[str]) -> None:
    """Execute one task in Flower's own app process, with a check before the app is installed."""
    package, app = "flwr.superlink" if role == "server" else "flwr.supernode", APPS[role]
    module, command = import_module(f"{package}.runtime.run_{app}"), import_module(f"{package}.cli.flwr_{app}")
    guard(module, role, folder)
    obtain = command.try_obtain_flwr_app_token

    def obtain_once(args: Any) -> str:
        try:
            return str(obtain(args))
        finally:
            token.unlink(missing_ok=True)

    command.try_obtain_flwr_app_token = obtain_once  # type: ignore[attr-defined]
    sys.argv = [f"flwr-{app}", "--token-file", str(token), *options]
    getattr(command, f"flwr_{app}")()


def guard(module: Any, role: str, folder: Path) -> None:
    """Make Flower's module compare the app that it was sent with the allow-list before it installs the app."""
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.common.serde import user_config_from_proto
    from flwr.supercore.runtime import RuntimeHttpClient

    allow_list = folder / (approval.SERVER if role == "server" else approval.NODE)
    pull, install, tasks = RuntimeHttpClient.PullTaskInput, module.install_from_fab, list[Any]()

    def pull_and_remember(self: Any, request: Any) -> Any:
        tasks.append(pull(self, request))
        return tasks[-1]

    def check_and_install(content: bytes, **options: Any) -> Any:
        (task,) = tasks
        run, override = task.run, user_config_from_proto(task.run.override_config)
        entry = {"role": role, "flower_run": run.run_id, "app": run.fab_hash, "settings": override}
        try:
            app = approval.check(allow_list, content, override)
            if {run.fab_hash, task.fab.hash_str} != {app} or get_fab_metadata(content) != (run.fab_id, run.fab_version):
                raise approval.NotApprovedError("the run names another app than the one that was sent")
        except approval.NotApprovedError as error:
            audit.append(folder / AUDIT, "refused", **entry, reason=str(error))
            raise
        audit.append(folder / AUDIT, "started", **entry)
        return install(content, **options)

    RuntimeHttpClient.PullTaskInput = pull_and_remember
    module.install_from_fab = check_and_install


def main(command: str = "", folder: str = "", *arguments: str) -> None:
    roles = {f"flwr-{app}": role for role, app in APPS.items()}
    if command in APPS:
        start(command, Path(folder), *arguments)
    elif command in roles:  # `Launcher.launch` calls it so
        run_app(roles[command], Path(folder), Path(arguments[0]), list(arguments[1:]))
    else:
        sys.exit(f"launcher: got {command!r}, expected one of {', '.join([*APPS, *roles])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
