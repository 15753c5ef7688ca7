"""What the site adds to Sphinx: links between documents and docstrings, in both directions."""

from __future__ import annotations

import inspect
import re
import zlib
from pathlib import Path
from typing import Any

import site_reference
from docutils import nodes
from site_reference import MADE_BY_GPUCOLL, with_links
from sphinx import addnodes
from sphinx.util.inspect import stringify_signature

import gpucoll
from gpucoll import errors

NAME = re.compile(r"(?:(comm|gpucoll)\.)?([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)
"""A name as documents write it, ``comm.all_reduce(x)``: before its point, the name, its call."""
OWN_TYPE = re.compile(r"\bAny[A-Z]|\b_[A-Z]|npt\.|\b(?:M|Op|Rows)\b")
"""A name of types that users need not know."""
DEFAULTS = {"source=-1": "source=ANY_SOURCE", "tag=-1": "tag=ANY_TAG", "<class 'float'>": "float"}
"""Values of parameters, as autodoc and as people write them."""
LISTS_NAMES = "docs/api"
"""The document in which names of calls stand alone."""


def setup(app: Any) -> dict[str, Any]:
    """Register it; if what makes pages changes, Sphinx reads them all again."""
    app.connect("autodoc-process-docstring", _link_documents)
    app.connect("autodoc-process-signature", _fit_signature)
    app.connect("doctree-read", _link_names)
    makers = (__file__, site_reference.__file__, f"{app.confdir}/conf.py")
    version = zlib.crc32(b"".join(Path(each).read_bytes() for each in makers))
    return {"parallel_read_safe": True, "env_version": 1 + version}


def _link_documents(
    app: Any, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    lines[:] = [with_links(line) for line in lines]


def _fit_signature(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, result: str
) -> tuple[str | None, str | None] | None:
    """Leave out constructors that programs do not call; show types that a docstring does not tell.

    Most docstrings describe the types of parameters in words, better than a signature that covers
    all overloads.
    """
    if what == "class" and name.rpartition(".")[2] in MADE_BY_GPUCOLL:
        return "", None
    if what in ("function", "method") and "Parameters\n" not in inspect.cleandoc(
        value.__doc__ or ""
    ):
        signature, result = _with_types(value) or (signature, result)
    for default, written in DEFAULTS.items():
        signature = signature and signature.replace(default, written)
    return signature, result


def _with_types(value: Any) -> tuple[str, str] | None:
    """Return the parameters and the result with types; None if these are names of gpucoll's own."""
    shown = inspect.signature(value)
    if "self" in shown.parameters:
        shown = shown.replace(parameters=[*shown.parameters.values()][1:])
    given = stringify_signature(shown, show_return_annotation=False, unqualified_typehints=True)
    result = "" if shown.return_annotation is shown.empty else str(shown.return_annotation)
    return None if OWN_TYPE.search(given + result) else (given, result)


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
