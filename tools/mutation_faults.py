"""Where the code can have a one-line fault, and how a fault is put into it.

A fault is found by the text of its lines inside its function, not by their number. So a list of
faults still fits after other lines of the file have changed.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDERS = ("src/gpucoll", "backends", "kernels")
FLIPPED, DROPPED, RANK = "flipped comparison", "dropped wait", "wrong rank"
OFF, SKIPPED, ERROR = "off by one", "skipped check", "wrong error"
KINDS = (FLIPPED, DROPPED, RANK, OFF, SKIPPED, ERROR)
NOT_DRAWN = {
    "backends/mpi": "its tests need an MPI",
    "src/gpucoll/arrays/jax_arrays.py": "its tests need JAX",
    "src/gpucoll/arrays/torch_compiler.py": "its tests need PyTorch's compiler",
    "src/gpucoll/integrations/dask": "its tests need Dask",
    "src/gpucoll/integrations/engine": "its tests need Ray or Dask",
    "src/gpucoll/integrations/ray": "its tests need Ray",
}
"""Files and folders whose tests are skipped on most machines."""
MOST_PER_FILE = 3

_SIGNS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
_WAITING = re.compile(
    r"_*([a-z]+_)*(wait[a-z]*|await|barrier|fence|join|synchroni[sz]e|flush)(_|$)"
)
_CHECKING = re.compile("_*(check|require|validate|ensure|verify|refuse|reject)")
_RANKS = ("rank", "me", "root", "peer", "owner", "left", "right", "sender", "receiver", "other")
_STATUSES = {
    *("EVENT", "MISMATCH", "DEADLINE", "LOST", "SIGNAL", "NOT_RUN", "MORE"),
    *("MISFIT", "NO_ROOM", "NOT_YET"),
}
_COMPILERS = {"inline", "inline_typed", "compiled", "compiled_when_used"}
_UNTESTED = re.compile(
    r"deadline|timeout|monotonic|elapsed|now\b|_ns\b|_s\b|spin|yield|sleep|poll|prefetch|sharing",
    re.IGNORECASE,
)
"""Times and the like, which no test can tell from a value nearby."""
_OF_TEXTS = re.compile("(^|_)(describe|draw|explain|hint|message|report|say|spelled|text)(_|$)")
_SPEAKING = re.compile("debug|info|log|print|say|warn|warning|write|type|.*(Error|Warning)")
_DANGEROUS = {
    *("kill", "killpg", "pidfd_send_signal", "send_signal", "terminate"),
    *("chmod", "chown", "rmdir", "rmtree", "unlink"),
}
"""A fault near such a call could reach a process or a file that is none of the tests'."""
_MOST = 4096
"""A larger constant is a limit or a mask, and one more or less is the same."""


@dataclass(frozen=True)
class Fault:
    """A change of one statement or expression; the number of lines stays the same.

    Attributes
    ----------
    line : int
        Number of the first changed line when the fault was drawn.
    function : str
        Qualified name of the function around it.
    old, new : str
        The lines before and after the change.
    occurrence : int
        How many equal texts precede it in the function.
    """

    kind: str
    file: str
    line: int
    function: str
    old: str
    new: str
    occurrence: int

    @property
    def place(self) -> str:
        """The file and the line."""
        return f"{self.file}:{self.line}"


class MissingError(Exception):
    """The code no longer has the lines that a fault changes."""


def mutated(text: str, fault: Fault) -> str:
    """Return the text of a file with a fault in it."""
    lines, old = text.split("\n"), fault.old.split("\n")
    function = _functions(ast.parse(text)).get(fault.function)
    places = _occurrences(lines, old, function) if function else []
    if fault.occurrence >= len(places):
        raise MissingError(f"{fault.place} is no longer `{fault.old.strip()}`")
    begin = places[fault.occurrence]
    return "\n".join([*lines[:begin], *fault.new.split("\n"), *lines[begin + len(old) :]])


def _functions(tree: ast.AST, prefix: str = "") -> dict[str, Any]:
    """Return the functions and classes of a file by their qualified names."""
    found: dict[str, Any] = {}
    for node in ast.iter_child_nodes(tree):
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{prefix}{node.name}" if is_named else ""  # type: ignore[attr-defined]
        found = _functions(node, f"{name}." if name else prefix) | found
        if name:
            found.setdefault(name, node)
    return found


def _occurrences(lines: list[str], old: list[str], function: Any) -> list[int]:
    places = range(function.lineno - 1, function.end_lineno - len(old) + 1)
    return [n for n in places if lines[n : n + len(old)] == old]


# --- drawing --------------------------------------------------------------------------------------


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Draw faults from the code of a checkout: each kind in turn, spread over folders.

    The same seed and code give the same faults. If the code has fewer, all of them are returned.
    """
    possible: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in all_faults(root):
        possible[fault.kind, str(Path(fault.file).parent)].append(fault)
    generator = random.Random(seed)
    drawn: list[Fault] = []
    functions: set[tuple[str, str]] = set()
    per_file, per_folder = Counter[str](), Counter[tuple[str, str]]()
    while len(drawn) < count and possible:
        kind = min(KINDS, key=lambda kind: sum(each.kind == kind for each in drawn))
        keys = [key for key in possible if key[0] == kind] or list(possible)
        weights = [len(possible[key]) ** 0.5 / (1 + per_folder[key]) for key in keys]
        key = generator.choices(keys, weights)[0]
        fault = possible[key].pop(generator.randrange(len(possible[key])))
        if not possible[key]:
            del possible[key]
        function = (fault.file, fault.function)
        is_new = function not in functions and per_file[fault.file] < MOST_PER_FILE
        if is_new and _is_valid(root, fault):
            functions.add(function)
            per_file[fault.file] += 1
            per_folder[key] += 1
            drawn.append(fault)
    return drawn


def _is_valid(root: Path, fault: Fault) -> bool:
    text = (root / fault.file).read_text(encoding="utf-8")
    try:
        compile(mutated(text, fault), fault.file, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def all_faults(root: Path) -> Iterator[Fault]:
    """Yield every fault that the code of a checkout can have; a few are no valid Python."""
    bases: dict[str, set[str]] = {}
    errors = ast.parse((root / "src/gpucoll/errors.py").read_text(encoding="utf-8"))
    for node in errors.body:
        if isinstance(node, ast.ClassDef):
            direct = {ast.unparse(base) for base in node.bases}
            bases[node.name] = direct.union(*(bases.get(name, set()) for name in direct))
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if not any(file == place or file.startswith(f"{place}/") for place in NOT_DRAWN):
            yield from faults_of(file, path.read_text(encoding="utf-8"), bases)


def faults_of(file: str, text: str, errors: dict[str, set[str]]) -> Iterator[Fault]:
    """Yield the faults of a file.

    Parameters
    ----------
    file : str
        Its path in the checkout.
    text : str
        Its content.
    errors : dict
        The classes of `gpucoll.errors`, each with all its bases.
    """
    tree = ast.parse(text)
    finder = _Finder(tree, text, errors)
    finder.visit(tree, _Function())
    functions = _functions(tree)
    for kind, name, begin, new in finder.changes:
        old = finder.lines[begin : begin + new.count("\n") + 1]
        places = _occurrences(finder.lines, old, functions[name])
        if begin in places:  # otherwise another function has this name, too
            yield Fault(kind, file, begin + 1, name, "\n".join(old), new, places.index(begin))


# --- the places of faults -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """The function around a node; without a text there is none."""

    name: str = ""
    text: str = ""
    is_compiled: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    """Variables that may be numbers, with the line after which they have a value."""


class _Finder:
    """Walks through a file and notes the kind, function, first line and new text of each change."""

    def __init__(self, tree: ast.Module, text: str, errors: dict[str, set[str]]) -> None:
        self.lines = text.split("\n")
        self.changes: list[tuple[str, str, int, str]] = []
        self._text, self._errors = text, errors
        self._global: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                self._global |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                names = (each for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name))
                self._global |= {each.id for each in names}

    def visit(self, node: ast.AST, around: _Function) -> None:
        """Note the changes of a node and of all below it."""
        children = _children(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            children = iter(() if _is_left_out(node) else node.body)
            around = _entered(node, around)
        elif isinstance(node, ast.ClassDef):
            around = _Function(f"{around.name}.{node.name}".lstrip("."))
        elif around.text:
            self._note(node, around)
        for child in children:
            self.visit(child, around)

    def _note(self, node: ast.AST, function: _Function) -> None:
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call):
            self._note_errors(call, function)
        if isinstance(node, ast.Compare):
            self._note_flips(node, function)
        if isinstance(node, ast.stmt):
            self._note_waits(node, function)
            self._note_checks(node, function)
            self._note_statuses(node, function)
        elif isinstance(node, ast.expr):
            for new in self._other_ranks(node, function):
                self._add(RANK, function, node, new)
        for number in _numbers(node):
            old = ast.unparse(number)
            old = old if re.fullmatch(r"[\w.]+", old) else f"({old})"
            for step, spelled in ((1, f"{old} + 1"), (-1, f"{old} - 1")):
                is_constant = isinstance(number, ast.Constant)
                new = str(number.value + step) if is_constant else spelled  # type: ignore[attr-defined]
                self._add(OFF, function, number, new)

    def _add(self, kind: str, function: _Function, node: Any, new: str) -> None:
        """Note that the text of a node becomes another one; blank lines keep the line count."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        head = lines[0].encode()[: node.col_offset].decode()
        tail = lines[-1].encode()[node.end_col_offset :].decode()
        more = len(lines) - 1
        whole = f"{head}{new}" + " \\\n" * more + tail
        if isinstance(node, ast.stmt):
            whole = f"{head}{new}{tail}" + "\n" * more
        self.changes.append((kind, function.name, node.lineno - 1, whole))

    def _note_flips(self, node: ast.Compare, function: _Function) -> None:
        operands = [node.left, *node.comparators]
        for left, operation, right in zip(operands, node.ops, node.comparators, strict=False):
            sign, other = _SIGNS.get(type(operation), ("", ""))
            is_order = sign not in ("==", "!=")
            if not sign or left.end_lineno != right.lineno:
                continue
            if not is_order or not _UNTESTED.search(ast.unparse(node)):
                line, begin = self.lines[right.lineno - 1].encode(), left.end_col_offset or 0
                between = ast.Constant(0, lineno=right.lineno, end_lineno=right.lineno)
                between.col_offset, between.end_col_offset = begin, right.col_offset
                old = line[begin : right.col_offset].decode()
                self._add(FLIPPED, function, between, old.replace(sign, other, 1))

    def _note_waits(self, node: ast.stmt, function: _Function) -> None:
        call = getattr(node, "value", None)
        call = call.value if isinstance(call, ast.Await) else call
        if isinstance(call, ast.Call) and _WAITING.match(_name_of(call)):
            if isinstance(node, ast.Expr) and "sys.std" not in ast.unparse(call):
                self._add(DROPPED, function, node, "pass")
            elif function.is_compiled and isinstance(node, ast.Return | ast.Assign):
                self._add(DROPPED, function, call, "0")

    def _other_ranks(self, node: ast.expr, function: _Function) -> Iterator[str]:
        old, size = ast.unparse(node), "world_size"
        bound = {name for name, line in function.numbers.items() if line < node.lineno}
        if isinstance(node, ast.Name) and old in bound.intersection(_RANKS):
            yield from sorted(bound.intersection(_RANKS) - {old})
            yield from [f"(({old} + 1) % {size})"] if size in bound else []
            yield from ["0"] if old == "root" else []
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            size = f"{ast.unparse(node.value)}.world_size"
            text = self._text if size.startswith("self.") else function.text
            if node.attr == "rank" and re.search(rf"(?<![\w.]){re.escape(size)}\b", text):
                yield f"(({old} + 1) % {size})"
            yield from ["0"] if node.attr == "root" else []
        elif old == "get(call, ROOT)":
            yield "0"
        elif old == "get(context, RANK)" and "WORLD_SIZE" in self._global:
            yield f"(({old} + 1) % get(context, WORLD_SIZE))"

    def _note_checks(self, node: ast.stmt, function: _Function) -> None:
        if isinstance(node, ast.If) and len(node.body) == 1 and not node.orelse:
            is_status = re.search(r"status|\bOK\b", ast.unparse(node.test))
            is_left = function.is_compiled and is_status and isinstance(node.body[0], ast.Return)
            if isinstance(node.body[0], ast.Raise) or is_left:
                self._add(SKIPPED, function, node.test, "False")
        elif isinstance(node, ast.Expr) and _CHECKING.match(_name_of(node.value)):
            self._add(SKIPPED, function, node, "pass")

    def _note_errors(self, node: ast.Call, function: _Function) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in self._errors and name in self._global:
            others = [each for each in self._errors if name not in {each, *self._errors[each]}]
            imported = [each for each in others if each in self._global]
            for other in imported or others[1:6]:
                new = other if imported else f'__import__("gpucoll.errors").errors.{other}'
                self._add(ERROR, function, node.func, new)

    def _note_statuses(self, node: ast.stmt, function: _Function) -> None:
        value = getattr(node, "value", None)
        if not function.is_compiled or not isinstance(node, ast.Return | ast.Assign):
            return
        if isinstance(value, ast.Name) and value.id.strip("_") in _STATUSES:
            names = {name for name in self._global if name.strip("_") in {*_STATUSES, "OK"}}
            for other in sorted(names - {value.id}):
                self._add(ERROR, function, value, other)


def _entered(node: ast.FunctionDef | ast.AsyncFunctionDef, around: _Function) -> _Function:
    """Return what is known inside a function."""
    numbers: dict[str, int] = {}
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        if argument.annotation is None or "int" in ast.unparse(argument.annotation).split():
            numbers[argument.arg] = node.lineno
    for each in (each for each in node.body if isinstance(each, ast.Assign)):
        for target in ast.walk(each):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                numbers.setdefault(target.id, each.end_lineno or 0)
    for used in ast.walk(node):
        owner = getattr(used, "func" if isinstance(used, ast.Call) else "value", None)
        if isinstance(used, ast.Attribute | ast.Subscript | ast.Call):
            numbers.pop(getattr(owner, "id", ""), None)  # an object, not a number
    is_compiled = bool({_name_of(each) for each in node.decorator_list} & _COMPILERS)
    name, is_compiled = f"{around.name}.{node.name}".lstrip("."), is_compiled or around.is_compiled
    return _Function(name, ast.unparse(node), is_compiled, numbers)


def _is_left_out(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function only makes texts, or is one near which a fault could do harm."""
    below = list(ast.walk(node))
    has_text = any(isinstance(each, ast.JoinedStr) for each in below)
    makes_text = has_text and node.returns and re.search(r"\bstr\b", ast.unparse(node.returns))
    names = {_name_of(each) for each in (*below, *node.decorator_list)}
    is_text = node.name in ("__repr__", "__str__", "__format__") or _OF_TEXTS.search(node.name)
    return bool(makes_text or is_text or names & (_DANGEROUS | {"overload"}))


def _name_of(node: ast.AST) -> str:
    """Return the last part of the name of a function or of what is called."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node, without texts, annotations and what only type checkers read."""
    is_text = isinstance(node, ast.Call) and _SPEAKING.fullmatch(_name_of(node))
    is_of_objects = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)
    if is_text or is_of_objects or isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        yield from node.orelse
    elif isinstance(node, ast.AnnAssign):
        yield from () if node.value is None else (node.value,)
    else:
        yield from ast.iter_child_nodes(node)


def _numbers(node: ast.AST) -> Iterator[ast.expr]:
    """Yield operands, bounds and indices that can be off by one."""
    found: Iterable[ast.expr | None] = ()
    is_bound = isinstance(node, ast.Slice) or (
        isinstance(node, ast.Call) and _name_of(node) == "range"
    )
    if isinstance(node, ast.Compare) and all(type(each) in _SIGNS for each in node.ops):
        found = (node.left, *node.comparators)
    elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.LShift | ast.RShift | ast.Pow):
        found = (node.left, node.right)
    elif isinstance(node, ast.Subscript):
        found = (node.slice,)
    elif is_bound:
        found = (node.lower, node.upper) if isinstance(node, ast.Slice) else node.args  # type: ignore[attr-defined]
    for each in found if found and not _UNTESTED.search(ast.unparse(node)) else ():
        if isinstance(each, ast.Constant):
            if type(each.value) is int and each.value <= _MOST and each.value != 8:
                yield each
        elif each is not None and is_bound:
            yield each
