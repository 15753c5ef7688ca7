"""What the site adds to Sphinx."""

from __future__ import annotations

from typing import Any

from site_reference import MADE_BY_GPUCOLL, with_links


def setup(app: Any) -> dict[str, bool]:
    """Register it."""
    app.connect("autodoc-process-docstring", _link_documents)
    app.connect("autodoc-process-signature", _hide_parameters)
    return {"parallel_read_safe": True}


def _link_documents(
    app: Any, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    lines[:] = [with_links(line) for line in lines]


def _hide_parameters(
    app: Any, what: str, name: str, value: object, options: Any, signature: str, result: str
) -> tuple[str, str] | None:
    """Show the classes that programs do not call without the parameters of their constructors."""
    is_hidden = what == "class" and name.rpartition(".")[2] in MADE_BY_GPUCOLL
    return ("", "") if is_hidden else None
