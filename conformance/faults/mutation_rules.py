"""The rules by which mutants are made: what in a function is changed, and into what."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SYMBOLS: Mapping[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.And: "and",
    ast.Or: "or",
    ast.USub: "-",
    ast.UAdd: "+",
    ast.Invert: "~",
    ast.Not: "not",
}

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "//": ("*",),
    "%": ("//",),
    "**": ("*",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "<": ("<=", ">"),
    "<=": ("<",),
    ">": (">=", "<"),
    ">=": (">",),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
    "and": ("or",),
    "or": ("and",),
}
"""What an operator, a comparison or a connective becomes."""

FUNCTIONS: Mapping[str, str] = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "floor": "ceil",
    "ceil": "floor",
    "round": "floor",
    "sum": "mean",
    "mean": "sum",
    "any": "all",
    "all": "any",
    "sigmoid": "tanh",
    "silu": "gelu",
    "softplus": "relu",
}
"""What the name of a function or method becomes."""

LIBRARIES = ("torch", "functional", "math")
"""Modules: of `torch.exp(x)` the argument is left, of `x.exp()` the object."""

KEPT_METHODS = ("to", "contiguous", "clone")
"""Not dropped: types, layouts and copies, which mostly raise or make no difference without them."""

KEPT_FUNCTIONS = (
    *("range", "len", "zip", "enumerate", "sorted", "min", "max"),
    *("int", "set", "list", "tuple", "dict", "isinstance"),
)
"""Not dropped: what makes or measures another kind of thing than its argument, and raises without it."""

KEPT_KEYWORDS = ("compute", "dim", "strict")
"""Not dropped: the type of the arithmetic, what has no default, and a check."""

SYMMETRIC = ("min", "max", "minimum", "maximum")
"""Functions whose arguments are not exchanged: that changes nothing."""

LARGER, SMALLER, NEAR_ZERO = 1.02, 0.5, 1e-3
"""Factors that make the neighbours of a constant, and the neighbour of zero."""

COUNTED_FROM_THE_END = (1, 2)
"""Constants that keep their minus: -1 and -2 are mostly dimensions, and the same ones counted from the front differ in
the number of dimensions only."""


@dataclass(frozen=True)
class Change:
    """What stands at `place` becomes `new`."""

    place: ast.expr | ast.stmt
    new: str
    words: str


def changes_in(function: ast.FunctionDef) -> Iterator[Change]:
    """All changes of a function that can matter to a result."""
    for node in _parts(function):
        for rule in (_operators, _constants, _conditions, _calls, _slices, _statements):
            yield from rule(node)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it whose change can matter to a result."""
    if not _matters(node):
        return
    yield node
    children: Iterator[ast.AST]
    match node:
        case ast.FunctionDef(body=body):
            children = iter(body)
        case ast.AnnAssign(value=value):
            children = iter(() if value is None else (value,))
        case _:
            children = ast.iter_child_nodes(node)
    for child in children:
        yield from _parts(child)


def _matters(node: ast.AST) -> bool:
    """Not so: docstrings, texts, defaults, assertions, and refusals of arguments, which no case is about."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.arguments():
            return False
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict"):
            return False
        case ast.If(body=[ast.Raise()], orelse=[]):
            return False
    return True


def _operators(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
            for old, new in _others(op):
                yield Change(node, f"({_code(left)}) {new} ({_code(right)})", f"{old} becomes {new}")
        case ast.AugAssign(target, op, value):
            for old, new in _others(op):
                yield Change(node, f"{_code(target)} {new}= {_code(value)}", f"{old}= becomes {new}=")
        case ast.BoolOp(op, values):
            for old, new in _others(op):
                yield Change(node, f" {new} ".join(f"({_code(value)})" for value in values), f"{old} becomes {new}")
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if value in COUNTED_FROM_THE_END:
            pass
        case ast.UnaryOp(op, operand):
            yield Change(node, _code(operand), f"{SYMBOLS[type(op)]} dropped")


def _others(operator: ast.AST) -> Iterator[tuple[str, str]]:
    old = SYMBOLS[type(operator)]
    return ((old, new) for new in OPERATORS.get(old, ()))


def _constants(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Constant(bool(value)):
            yield Change(node, str(not value), f"{value} becomes {not value}")
        case ast.Constant(int(value)):
            for whole in (value + 1, value - 1):
                yield Change(node, str(whole), f"{value} becomes {whole}")
        case ast.Constant(float(value)):
            for real in (value * LARGER, value * SMALLER) if value else (NEAR_ZERO, -NEAR_ZERO):
                yield Change(node, repr(real), f"{value} becomes {real}")


def _conditions(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.If(test):
            yield Change(test, "True", "the condition is always true")
            yield Change(test, "False", "the condition is always false")
        case ast.IfExp(_, body, orelse):
            yield Change(node, _code(body), "the condition is always true")
            yield Change(node, _code(orelse), "the condition is always false")


def _calls(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Call(ast.Name(name) as function, arguments, keywords):
            owner, renamed = None, FUNCTIONS.get(name, "")
        case ast.Call(ast.Attribute(owner, name) as function, arguments, keywords):
            renamed = f"{_code(owner)}.{FUNCTIONS[name]}" if name in FUNCTIONS else ""
        case _:
            return
    spread = any(isinstance(argument, ast.Starred) for argument in arguments)
    if owner is None or (isinstance(owner, ast.Name) and owner.id in LIBRARIES):
        if arguments and not spread and name not in KEPT_FUNCTIONS:
            yield Change(node, _code(arguments[0]), f"{name}() dropped")
    elif name not in KEPT_METHODS:
        yield Change(node, _code(owner), f".{name}() dropped")
    if renamed:
        yield Change(node, _call(renamed, arguments, keywords), f"{name} becomes {FUNCTIONS[name]}")
    if len(arguments) == 2 and not spread and name not in SYMMETRIC:
        yield Change(node, _call(_code(function), arguments[::-1], keywords), f"arguments of {name} exchanged")
    for keyword in keywords:
        flag = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
        # A flag that is dropped is one that is turned over, which `_constants` does.
        if keyword.arg is not None and keyword.arg not in KEPT_KEYWORDS and not flag:
            others = [other for other in keywords if other is not keyword]
            yield Change(node, _call(_code(function), arguments, others), f"{keyword.arg}= dropped")


def _call(function: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> str:
    return f"{function}({', '.join(_code(part) for part in (*arguments, *keywords))})"


def _slices(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Slice(lower, upper, step):
            if lower is not None:
                yield Change(node, _code(ast.Slice(None, upper, step)), "start of the slice dropped")
            if upper is not None:
                yield Change(node, _code(ast.Slice(lower, None, step)), "end of the slice dropped")


def _statements(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
        yield Change(node, "pass", "statement deleted")


def _code(node: ast.AST) -> str:
    return ast.unparse(node)
