"""Prints tables that do not wrap, because users copy names from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], right_aligned: Sequence[str] = (), title: str | None = None
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right_aligned else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)
