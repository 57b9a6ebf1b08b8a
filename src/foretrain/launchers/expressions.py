"""Evaluates what shell scripts compute: arithmetic, tests, edits of values."""

from __future__ import annotations

import ast
import fnmatch
import operator
from collections.abc import Callable


def edited(text: str, kind: str, pattern: str) -> str | None:
    """A value as ``${NAME%pattern}`` and the like have it; None where that is not known."""
    if kind in ("##", "#", "%%", "%"):
        cuts = range(len(text) + 1) if kind in ("#", "%%") else range(len(text), -1, -1)
        for cut in cuts:
            dropped, kept = (text[:cut], text[cut:]) if "#" in kind else (text[cut:], text[:cut])
            if fnmatch.fnmatchcase(dropped, pattern):
                return kept
        return text
    if kind.startswith("/"):
        old, _, new = pattern.partition("/")
        return text.replace(old, new, -1 if kind == "//" else 1)
    if kind[0] in "^,":
        return text.upper() if kind[0] == "^" else text.lower()
    return None


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge,
    "-le": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def tested(words: list[str]) -> bool | None:
    """The answer of one test; None where it is not known."""
    if words and words[0] == "!":
        answer = tested(words[1:])
        return None if answer is None else not answer
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-f", "-e", "-d", "-s", "-r", "-x"):
        return True  # what a script looks for is there
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3 or any("$" in word for word in words):
        return None
    left, how, right = words
    if how in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (how != "!=")
    numbers = evaluated(left), evaluated(right)
    if how not in _COMPARED or numbers[0] is None or numbers[1] is None:
        return None
    return _COMPARED[how](numbers[0], numbers[1])


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def evaluated(text: str) -> int | None:
    """The whole number that an expression is; None where it is none.

    >>> evaluated("8 * (2 + 1)"), evaluated("$N * 2")
    (24, None)
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError(ast.dump(node))
