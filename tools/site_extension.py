"""What the site adds to Sphinx: links between documents and docstrings, in both directions."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from site_reference import MADE_BY_GPUCOLL, with_links
from sphinx import addnodes

import gpucoll
from gpucoll import errors

NAME = re.compile(r"(?:(comm|gpucoll)\.)?([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)
"""A name as documents write it, ``comm.all_reduce(x)``: before its point, the name, its call."""
LISTS_NAMES = "docs/api"
"""The document in which names of calls stand alone."""


def setup(app: Any) -> dict[str, bool]:
    """Register it."""
    app.connect("autodoc-process-docstring", _link_documents)
    app.connect("autodoc-process-signature", _hide_parameters)
    app.connect("doctree-read", _link_names)
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


def _link_names(app: Any, document: Any) -> None:
    """Let public names in the text of documents lead to their docstrings."""
    page = app.env.docname
    for literal in list(document.findall(nodes.literal)):
        around = literal.parent
        if isinstance(around, (nodes.reference, nodes.title, addnodes.pending_xref)):
            continue
        target = target_of(literal.astext(), lists_names=page == LISTS_NAMES)
        if target:
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=page, refwarn=False
            )
            link += literal.deepcopy()
            around.replace(literal, link)


def target_of(text: str, *, lists_names: bool) -> str | None:
    """Return the full name that a piece of a document names; None if it names nothing public."""
    match = NAME.fullmatch(text)
    if match is None:
        return None
    before, name, call = match.groups()
    if before == "comm" or (not before and lists_names and call and _is_method(name)):
        return f"gpucoll.Communicator.{name}"
    if before or name in errors.__all__ or (lists_names and name.split(".")[0] in gpucoll.__all__):
        return f"gpucoll.{name}"
    return None


def _is_method(name: str) -> bool:
    return name in dir(gpucoll.Communicator)
