"""Tables as notebooks show them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every text is escaped, none is taken for markup."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    top = f"<caption style='text-align: left'>{escape(caption)}</caption>"
    return f"<table>{top}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
