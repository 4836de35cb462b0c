"""One page to read, from folders of runs: `write`.

gather.py    which runs there are            measures.py   their numbers          layers.py   the insides of a model
svg.py       pieces of a drawing             figures.py, panels.py   drawings     choose.py   which of them a part has
tables.py    tables                          document.py   the page; page.css and page.js are put into it
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pfedlms.errors import UsageError
from pfedlms.experiment.store import write_atomically
from pfedlms.report.page.document import document, sections_of
from pfedlms.report.page.figures import WIDE
from pfedlms.report.page.gather import gather
from pfedlms.report.page.svg import alone


def write(directories: Iterable[str | Path], file: str | Path, figures: str | Path | None = None) -> list[Path]:
    """Write the page of all runs, comparisons and sweeps in `directories` to `file`, and with `figures` every figure
    as SVG and its data as CSV to that folder. Gives what was written.

    Only what the runs have stored is read: no data set is needed, and nothing is trained.
    """
    gathered = gather(directories)
    sections, chosen = sections_of(gathered)
    texts = {Path(file): document(gathered, sections, chosen)}
    if figures is not None:
        for section in sections:
            for figure in section.figures:
                stem = Path(figures) / f"{section.slug}-{figure.name}"
                texts[stem.with_suffix(".svg")] = alone(figure.draw(WIDE))
                texts[stem.with_suffix(".csv")] = figure.csv()
    for path, text in texts.items():
        _write(path, text)
    return list(texts)


def _write(path: Path, text: str) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder, expected a file to write; name one with -o report.html")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); name another file") from error
