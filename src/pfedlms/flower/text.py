"""A peer's text, made harmless before it is shown or stored. Imports nothing, so that launchers stay small."""

from __future__ import annotations

import unicodedata

LONGEST_TEXT = 300
"""Characters of a peer's text that are shown or stored."""


def shown(text: str, longest: int = LONGEST_TEXT) -> str:
    """A peer's text in one line of printable characters: line ends, control, direction and unassigned characters are
    written as escapes."""
    cut = text[:longest]
    escaped = "".join(each if _harmless(each) else each.encode("unicode_escape").decode("ascii") for each in cut)
    return escaped + "…" * (len(text) > longest)


def _harmless(character: str) -> bool:
    return character == " " or unicodedata.category(character)[0] not in "CZ"
