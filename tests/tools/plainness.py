"""How much logic a file of Python holds, and how densely it is written."""

import ast
import io
import itertools
import tokenize
from collections import Counter
from collections.abc import Iterator

# What computes something. Names and constants are not counted, nor what stands in annotations.
LOGIC = (
    ast.Call,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.NamedExpr,
    ast.Lambda,
    ast.Subscript,
    ast.Attribute,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Starred,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.JoinedStr,
    ast.Dict,
    ast.List,
    ast.Set,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMPUTED = (ast.Call, ast.Attribute, ast.BinOp, ast.Subscript, ast.IfExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TRUTHS = ("bool", "isinstance", "any", "all", "hasattr")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def measure(source: str) -> Counter[str]:
    """Return the number of code lines, of expressions and of each habit in a file's text."""
    tree = ast.parse(source)
    typing = {id(inner) for root in annotations(tree) for inner in ast.walk(root)}
    found = Counter(lines=len(code_lines(source, tree)))
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        found["expressions"] += isinstance(node, LOGIC)
        found["pairs"] += is_pair(node)
        found["ternaries"] += isinstance(node, ast.IfExp)
        found["comprehensions"] += isinstance(node, COMPREHENSIONS)
        found["walruses"] += isinstance(node, ast.NamedExpr)
        found["truths as numbers"] += is_truth_as_number(node)
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                found["fragments of messages"] += fragments(statements)
    return found


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code: no blank line, comment or docstring."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def annotations(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the annotations of variables, arguments and results."""
    for node in ast.walk(tree):
        annotation = None
        if isinstance(node, ast.AnnAssign | ast.arg):
            annotation = node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotation = node.returns
        if annotation is not None:
            yield annotation


def is_pair(node: ast.AST) -> bool:
    """Whether an assignment sets several names to values that are computed side by side."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    written = {ast.unparse(element) for element in target.elts}
    if written == {ast.unparse(element) for element in node.value.elts}:
        return False  # a swap
    return any(isinstance(element, COMPUTED) for element in node.value.elts)


def is_truth_as_number(node: ast.AST) -> bool:
    """Whether a truth value is added, multiplied or an index, or a loop's condition is a tuple."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        return is_truth(node.left) or is_truth(node.right)
    if isinstance(node, ast.Subscript):
        return is_truth(node.slice)
    if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.IfExp):
        other = node.iter.orelse
        return isinstance(other, ast.Tuple | ast.List) and not other.elts
    return False


def is_truth(node: ast.AST) -> bool:
    """Whether an expression is a truth value by its form."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in TRUTHS


def fragments(block: list[ast.stmt]) -> int:
    """Count the texts that are put into a variable for the raise or the call behind it."""
    count = 0
    for before, after in itertools.pairwise(block):
        if not (isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name)):
            continue
        value = before.value
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if not (is_text or isinstance(value, ast.JoinedStr)):
            continue
        is_call = isinstance(after, ast.Expr) and isinstance(after.value, ast.Call)
        used = {inner.id for inner in ast.walk(after) if isinstance(inner, ast.Name)}
        if (is_call or isinstance(after, ast.Raise)) and before.targets[0].id in used:
            count += 1
    return count
