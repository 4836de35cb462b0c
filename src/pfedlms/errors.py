"""Every error this package raises on purpose.

PfedlmsError
├── UsageError            what the user gave cannot be used (the command line exits with 2)
│   ├── ConfigError       one or more settings are wrong; all of them are listed
│   ├── DataError         a data set is missing, broken or cannot be partitioned
│   │   └── DownloadError a file could not be fetched (the command line exits with 1)
│   ├── MethodError       a method returned something that its contract does not allow
│   └── RunDirectoryError a run directory is missing, in use, not writable or of another version
├── RunError              a run that started could not continue (the command line exits with 1)
│   ├── DivergedError     a loss or a model stopped being finite
│   ├── QuorumError       too few valid messages arrived in one exchange
│   └── StorageError      results could not be written
└── WireError             a message was refused; the subclass says why
    ├── TruncatedError    fewer bytes than the frame promises
    ├── OversizedError    more bytes than the message can have
    ├── MagicError        not a frame of this protocol
    ├── VersionError      another protocol version
    ├── ChecksumError     the bytes were changed on the way
    ├── DigestError       the two ends disagree on model, method or seed
    ├── KindError         another message than the one expected now
    ├── RoundError        a message of another round
    ├── SenderError       an unknown or repeated sender
    └── DecodeError       well framed, but its contents are not valid values
"""

from __future__ import annotations

import difflib
import shlex
import unicodedata
from collections.abc import Iterable, Sequence


class PfedlmsError(Exception):
    """Base of all errors raised by pfedlms."""

    exit_code = 1


class UsageError(PfedlmsError):
    exit_code = 2


class ConfigError(UsageError):
    """One or more settings are wrong; `problems` holds one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(UsageError): ...


class DataWarning(UserWarning):
    """Files can be read and are used, but are not the published ones, or have columns that may not be meant.
    It is the only warning with a class of its own, so that users can silence it."""


class DownloadError(DataError):
    """One line for the failure and one per file that the user has to fetch by hand."""

    exit_code = 1


class MethodError(UsageError):
    """A method returned something that its contract does not allow; the message names the method and the field."""

    is_named = False

    def of(self, method: str, function: str = "") -> MethodError:
        """The same error with the method's name before it, and that of its function where one is given; once."""
        if self.is_named:
            return self
        error = MethodError(": ".join(filter(None, (f"method {method}", function, str(self)))))
        error.is_named = True
        return error


class RunDirectoryError(UsageError): ...


class RunError(PfedlmsError):
    summary: dict[str, object] | None = None
    """What the run had measured, where it is known."""


class DivergedError(RunError): ...


class QuorumError(RunError): ...


class StorageError(RunError):
    """Writing failed for `reason`. The message says how to continue: `pfedlms resume` with the directory `resume`, or
    the same command where there is none."""

    def __init__(self, path: object, reason: str, resume: object = None) -> None:
        self.path, self.reason = path, reason
        super().__init__()
        self.resume_with(f"`{resume_command(resume)}`" if resume else "repeat the same command, which continues")

    def resume_with(self, remedy: str) -> None:
        """Say how to continue, where that is known better."""
        self.args = (f"{self.path}: cannot write ({self.reason}); make room, then {remedy}",)


class WireError(PfedlmsError): ...


class TruncatedError(WireError): ...


class OversizedError(WireError): ...


class MagicError(WireError): ...


class VersionError(WireError): ...


class ChecksumError(WireError): ...


class DigestError(WireError): ...


class KindError(WireError): ...


class RoundError(WireError): ...


class SenderError(WireError): ...


class DecodeError(WireError): ...


def reason(error: BaseException) -> str:
    """Why code of the user or of a library failed, in one line: the error's text, after its class unless that is one of
    the general ones."""
    text = str(error).strip().partition("\n")[0]
    if text and type(error) in (RuntimeError, ValueError, TypeError, IndexError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def resume_command(directory: object) -> str:
    """The command that resumes what is in a folder, to be copied to a shell."""
    return f"pfedlms resume {shlex.quote(str(directory))}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A closing sentence that names the nearest valid name, or all of them if none is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {near[0]}?" if near else f"expected one of: {', '.join(known)}"


def printable(text: str, longest: int = 300) -> str:
    """A peer's text in one line of printable characters, cut to `longest` of them: line ends, control, direction and
    unassigned characters are written as escapes."""
    escaped = "".join(
        each if each == " " or unicodedata.category(each)[0] not in "CZ" else each.encode("unicode_escape").decode()
        for each in text[:longest]
    )
    return escaped + "…" * (len(text) > longest)
