"""The pages of the site that are made of code: the API's docstrings, and the help of commands.

gpucoll must be importable: tools/make_site.py puts the link tree on the path. Sphinx's autodoc
reads the docstrings; what stands here decides which names have a page, and in which order.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

MOCKED = (
    *("cryptography", "cupy", "dask", "distributed", "dp_accounting", "flwr", "jax", "jaxlib"),
    *("keras", "mpi4py", "mxnet", "ray", "tensorflow", "torch"),
    "gpucoll.integrations.jax.handlers",
    "gpucoll.integrations.jax.primitives",
    "gpucoll.integrations.mxnet.arrays",
    "gpucoll.integrations.mxnet.engine",
    "gpucoll.integrations.tensorflow.c_api",
    "gpucoll.integrations.torch.batches",
)
"""Modules of which autodoc imports doubles, so that building the site needs no framework.

The modules of gpucoll among them call a framework when they are imported.
"""

ELSEWHERE = {"python": "https://docs.python.org/3", "numpy": "https://numpy.org/doc/stable"}
"""Sites whose names types link to, if the build may use a network."""
API, ENGINES = "docs/api.md", "docs/engines.md"


class Page(NamedTuple):
    """A page of the reference: some names of the package, or the public names of a module."""

    guide: str
    """The document on the same subject, by path."""
    module: str = "gpucoll"
    title: str = ""
    """Default: the name of the module."""
    names: tuple[str, ...] = ()
    """Default: the module's ``__all__``."""
    children: tuple[str, ...] = ()
    """Pages that stand below this one in the navigation."""


INTEGRATIONS = ("torch", "jax", "tensorflow", "keras", "mxnet", "mpi4py", "horovod", "ray", "dask")
PAGES = {
    "start": Page(API, title="init, join, launch", names=("init", "join", "launch")),
    "communicator": Page(API, title="Communicator"),
    "works": Page(
        API,
        title="Works, plans, messages",
        names=(
            *("Work", "MessageWork", "wait_all", "wait_any", "Plan", "Message"),
            *("ANY_SOURCE", "ANY_TAG", "Description"),
        ),
    ),
    "ops": Page(API, title="Ops and compression", names=("ReduceOp", "Compression")),
    "errors": Page(API, "gpucoll.errors", title="Errors"),
    "training": Page("docs/training.md", "gpucoll.training", children=("gossip", "topology")),
    "gossip": Page("docs/gossip.md", "gpucoll.training.gossip"),
    "topology": Page("docs/gossip.md", "gpucoll.training.gossip.topology"),
    "tables": Page("docs/tables.md", "gpucoll.tables"),
    "federated": Page("docs/federated.md", "gpucoll.federated"),
    "testing": Page(
        "docs/testing.md", "gpucoll.testing", children=("host_device", "device_arrays")
    ),
    "host_device": Page("docs/host_device.md", "gpucoll.testing.host_device"),
    "device_arrays": Page("docs/host_device.md", "gpucoll.testing.device_arrays"),
    "integrations": Page(
        "docs/README.md", "gpucoll.integrations", children=(*INTEGRATIONS, "flower")
    ),
    **{
        name: Page(
            ENGINES if name in ("ray", "dask") else f"docs/{name}.md",
            f"gpucoll.integrations.{name}",
        )
        for name in INTEGRATIONS
    },
    "mpi4py": Page(
        "docs/mpi4py_programs.md",
        "gpucoll.integrations.mpi4py",
        names=("Rc", "rc", "get_config", "get_include", "profile"),
    ),
    "flower": Page("docs/federated.md", "gpucoll.integrations.flower"),
}
COMMANDS = "reference/commands.md"

FAMILIES = {
    "ArrayCollectives": "Collectives on arrays",
    "Reductions": "Reductions",
    "Scans": "Scans",
    "Gathering": "Gathering",
    "Movements": "Movements",
    "Messages": "Messages between two ranks",
    "Plans": "Plans",
    "Groups": "Calls put together",
    "Memory": "Memory",
    "Objects": "Objects",
    "Communicator": "Communicators, failures, the end",
}
"""The classes that `Communicator` inherits its methods from, and the heading of their methods."""
EVERY_COLLECTIVE = "every-collective"
"""The label of the arguments that all collectives share."""

MADE_BY_GPUCOLL = (
    *("Communicator", "Description", "Message", "MessageWork", "Plan", "ProcessGroup", "ReduceOp"),
    *("Array", "Topology", "Work"),
)
"""Classes that programs do not call: their parameters are not for users."""
FOR_FRAMEWORKS = ("DataParallel", "Gpucoll", "ProcessGroup", "SecureAggregation", "Streaming")
"""Classes whose methods a framework calls, and no program."""
FOREIGN = "BaseException, OSError, dict, int, str, tuple"
"""Classes whose members Python's documentation describes."""
INTERNAL = {
    "Array": ("address", "current_stream", "empty", "over"),
    "Compression": ("check_dtype", "kept", "parse", "wire_format"),
    "Description": ("of",),
    "MessageWork": (
        *("abandon", "begin", "call_back", "end", "go_on", "number", "settle", "takes"),
    ),
    "ReduceOp": ("check_dtype", "code", "depends_on_order", "digest", "parameter_bits", "parse"),
    "SecureSum": ("check_left", "checked", "is_reduced"),
    "Work": ("call_back", "end", "number"),
}
"""Members that the rest of gpucoll uses, and no program."""

DATA = {
    "ANY_SOURCE": "gpucoll.types",
    "ANY_TAG": "gpucoll.types",
    "KINDS": "gpucoll.devices.host.faults",
}
"""Values that are no objects of their own, and the modules that describe them."""

DOCUMENT = re.compile(r"`{0,2}\bdocs/([\w/-]+)\.md(?:#[\w-]+)?`{0,2}")


def in_navigation() -> list[str]:
    """Return the pages of the reference that stand directly in the navigation."""
    below = {child for page in PAGES.values() for child in page.children}
    return [*(f"reference/{name}.rst" for name in PAGES if name not in below), COMMANDS]


def pages() -> dict[str, str]:
    """Return the text of every page, by path."""
    texts = {f"reference/{name}.rst": _page(page) for name, page in PAGES.items()}
    texts["reference/communicator.rst"] = communicator_page()
    texts[COMMANDS] = _commands()
    return texts


def with_links(text: str) -> str:
    """Return a docstring in which the names of documents are links to them."""
    text = text.replace("`ArrayCollectives`", f":ref:`every collective <{EVERY_COLLECTIVE}>`")
    return DOCUMENT.sub(r":doc:`/docs/\1`", text)


# --- modules --------------------------------------------------------------------------------------


def _page(page: Page) -> str:
    """Return the page of a module, or of some names of the package."""
    lines = _title(page)
    if not page.names:
        lines += [f".. automodule:: {page.module}", "   :no-index:", ""]
    owner = "gpucoll" if page.module == "gpucoll.errors" else page.module
    lines += [f".. currentmodule:: {owner}", ""]
    for name, value in _public(page):
        lines += _directive(f"{owner}.{name}", value)
    if page.children:
        lines += [".. toctree::", "   :maxdepth: 1", "", *map(_entry, page.children)]
    return "\n".join([*lines, ""])


def _entry(name: str) -> str:
    """Return the line of a table of contents for a page below another one."""
    return f"   {PAGES[name].module.rpartition('.')[2]} <{name}>"


def _title(page: Page) -> list[str]:
    title = page.title or page.module
    guide = f":doc:`/{page.guide.removesuffix('.md')}`"
    return [title, "=" * len(title), "", f"With examples, and for reading: {guide}.", ""]


def _public(page: Page) -> Iterable[tuple[str, object]]:
    """Return the names of a page with their values, imported among doubles of the frameworks."""
    from sphinx.ext.autodoc.mock import ismock, mock, undecorate

    with mock(list(MOCKED)):  # anew for each: gpucoll.testing puts its own finder before this one
        module = importlib.import_module(page.module)
        names = page.names or getattr(module, "__all__", ())
        values = {name: getattr(module, name) for name in names}
    for value in values.values():
        if not isinstance(value, type):
            continue
        for name, member in [*vars(value).items()]:
            if ismock(member):  # what a double of a decorator returned
                setattr(value, name, undecorate(member))
        if any(ismock(each) for each in value.__mro__):
            _show_constructor(value)
    return values.items()


def _show_constructor(value: Any) -> None:
    """Let a class on a double show the parameters of its own constructor, not of the double's."""
    _self, *parameters = inspect.signature(value.__init__).parameters.values()
    value.__signature__ = inspect.Signature(parameters)


def _directive(path: str, value: object) -> list[str]:
    """Return the directive that documents a public name."""
    if isinstance(value, ModuleType):
        return []
    name = path.rpartition(".")[2]
    if name in DATA:
        return _data(path, DATA[name], value)
    if not isinstance(value, type):
        return [f".. autofunction:: {path}", ""]
    lines = [f".. auto{'exception' if issubclass(value, BaseException) else 'class'}:: {path}"]
    if name not in FOR_FRAMEWORKS:
        lines += ["   :members:", f"   :inherited-members: {FOREIGN}"]
    if name in INTERNAL:
        lines += [f"   :exclude-members: {', '.join(INTERNAL[name])}"]
    return [*lines, ""]


def _data(path: str, home: str, value: object) -> list[str]:
    """Return the description of a value, which stands below it in the source of its module."""
    from sphinx.pycode import ModuleAnalyzer

    analyzer = ModuleAnalyzer.for_module(home)
    analyzer.analyze()
    name = path.rpartition(".")[2]
    text = analyzer.attr_docs["", name]
    return [f".. data:: {name}", f"   :value: {value!r}", "", *(f"   {line}" for line in text)]


# --- the communicator -----------------------------------------------------------------------------


def communicator_page() -> str:
    """Return the page of the communicator: its methods under the headings of their families."""
    from gpucoll import Communicator

    lines = [
        *_title(PAGES["communicator"]),
        ".. currentmodule:: gpucoll",
        "",
        ".. autoclass:: Communicator",
        "",
    ]
    own, *inherited = Communicator.__mro__
    for family in [*(each for each in inherited if each.__name__ in FAMILIES), own]:
        heading = FAMILIES[family.__name__]
        if family.__name__ == "ArrayCollectives":
            lines += [f".. _{EVERY_COLLECTIVE}:", ""]
        lines += [heading, "-" * len(heading), ""]
        if family is not own:
            lines += [_introduction(family, Communicator), ""]
        for name, member in vars(family).items():
            if not name.startswith("_") and getattr(member, "__doc__", None):
                kind = "property" if isinstance(member, property) else "method"
                lines += [f".. auto{kind}:: Communicator.{name}", ""]
    return "\n".join(lines)


def _introduction(family: type, communicator: type) -> str:
    """Return what a family's docstring says below its first line; names of methods are links."""

    def link(match: re.Match[str]) -> str:
        is_method = callable(getattr(communicator, match[1], None))
        return f":meth:`{match[1]} <Communicator.{match[1]}>`" if is_method else match[0]

    text = (inspect.getdoc(family) or "").partition("\n")[2]
    return re.sub(r"(?<!`)`(\w+)`(?!`)", link, with_links(text))


# --- commands -------------------------------------------------------------------------------------


def _commands() -> str:
    """Return the page of the commands: what each prints for ``--help``."""
    from gpucoll.__main__ import COMMANDS as KNOWN

    os.environ["COLUMNS"] = "92"
    lines = ["# Commands", "", "What each command prints for `--help`. [The API](../docs/api.md)"]
    lines += ["says what else there is to know about them.", ""]
    for name, command in KNOWN.items():
        title = f"gpucoll {name}, gpucoll-{name}" if command.has_program else f"gpucoll {name}"
        text = command.make_parser().format_help().rstrip()
        lines += [f"## {title}", "", "```text", text, "```", ""]
    return "\n".join(lines)
