"""Small bugs: in Python by changing one node of a function, in SQL by changing one word."""

import ast
import copy
import re
from collections.abc import Iterator
from types import CodeType
from typing import Final

from msgspec import Struct

REPORT: Final = "_report_of_mutation_testing"


class Mutant(Struct, frozen=True):
    where: str  # the qualified name of a function, or the name of a statement
    line: int
    before: str
    after: str
    code: CodeType | str  # of the function, or the statement

    @property
    def name(self) -> str:
        return f"{self.where}:{self.line}  {self.before}  →  {self.after}"


_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COUNTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
}


def of_python(source: str) -> Iterator[Mutant]:
    """Every function of a module with one change at a time."""
    tree = ast.parse(source)
    for name, function in _functions(tree.body):
        for place, node in enumerate(_nodes(function)):
            for change in range(_count(node)):
                mutated = copy.deepcopy(tree)
                other = dict(_functions(mutated.body))[name]
                target = _nodes(other)[place]
                before = ast.unparse(target)
                changed = _change(target, change)
                _replace(other, target, changed)
                ast.fix_missing_locations(mutated)
                code = _code_of(compile(mutated, name, "exec"), name)
                line = getattr(node, "lineno", function.lineno)
                yield Mutant(name, line, _short(before), _short(ast.unparse(changed)), code)


def reporting(source: str) -> dict[str, CodeType]:
    """Every function of a module such that it reports its name as it begins."""
    tree = ast.parse(source)
    functions = dict(_functions(tree.body))
    for name, function in functions.items():
        call = ast.Call(ast.Name(REPORT, ast.Load()), [ast.Constant(name)], [])
        function.body.insert(0, ast.Expr(call))
    module = compile(ast.fix_missing_locations(tree), "reporting", "exec")
    return {name: _code_of(module, name) for name in functions}


def _functions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def _nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST]:
    """The nodes of its body, without annotations."""
    nodes: list[ast.AST] = []
    for statement in function.body:
        skipped: set[int] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.AnnAssign):
                skipped.update(id(each) for each in ast.walk(node.annotation))
            if isinstance(node, ast.arg) and node.annotation is not None:
                skipped.update(id(each) for each in ast.walk(node.annotation))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
                skipped.update(id(each) for each in ast.walk(node.returns))
            if id(node) not in skipped:
                nodes.append(node)
    return nodes


def _code_of(module: CodeType, name: str) -> CodeType:
    code = module
    for part in name.split("."):
        code = next(
            each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == part
        )
    return code


def _count(node: ast.AST) -> int:  # noqa: C901, PLR0911  one line each
    """How many changes there are of this node itself."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            return 1
        case ast.BoolOp(values=values):
            return 1 + len(values)  # the other word, or one of them left out
        case ast.UnaryOp(op=ast.Not()):
            return 1
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _COUNTED:
            return 1
        case ast.Constant(value=bool() | int() | float()):
            return 1
        case ast.If() | ast.IfExp() | ast.While():
            return 1
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            return 1
        case ast.Expr(value=ast.Call() | ast.Await() | ast.YieldFrom()):
            return 1
        case ast.Assign(targets=[ast.Attribute()]):
            return 1
        case ast.comprehension(ifs=[_, *_]):
            return 1
    return 0


def _change(node: ast.AST, number: int) -> ast.AST:  # noqa: C901  one line each
    match node:
        case ast.Compare(ops=[op]):
            node.ops = [_COMPARED[type(op)]()]
        case ast.BoolOp() if number == 0:
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        case ast.BoolOp():
            del node.values[number - 1]
            return node if len(node.values) > 1 else node.values[0]
        case ast.UnaryOp():
            return node.operand
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            node.op = _COUNTED[type(op)]()
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1)
        case ast.If() | ast.IfExp() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Return():
            node.value = ast.Constant(None)
        case ast.Expr() | ast.Assign():
            return ast.Pass()
        case ast.comprehension():
            node.ifs = node.ifs[1:]
    return node


def _replace(function: ast.AST, old: ast.AST, new: ast.AST) -> None:
    if old is new:
        return
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                setattr(parent, field, [new if each is old else each for each in value])


_OTHER_THAN: Final = " <> "
_WORDS: Final = (  # what stands there, what is put there
    (r"<=", "<"),
    (r">=", ">"),
    (r"(?<![<>=!-])<(?![=>])", "<="),
    (r"(?<![<>=!-])>(?![=>])", ">="),
    (r"\bIS NOT NULL\b", "IS NULL"),
    (r"\bIS NULL\b", "IS NOT NULL"),
    (r"\bAND\b", "OR"),
    (r"\bOR\b(?! (?:IGNORE|REPLACE))", "AND"),
    (r"\bNOT EXISTS\b", "EXISTS"),
    (r"(?<!NOT )\bEXISTS\b", "NOT EXISTS"),
    (r"\bDESC\b", "ASC"),
    (r"\bORDER BY (?!1\b)([\w.]+)(?! DESC)\b(?=[^,]|$)", r"ORDER BY \1 DESC"),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r"(?<=[\w)]) = (?=[\w:('])", _OTHER_THAN),
    (r"\bUNION ALL\b", "EXCEPT"),
)


def of_sql(statements: dict[str, str]) -> Iterator[Mutant]:
    """Every statement with one change at a time: a comparison, a condition, an order."""
    for name, statement in statements.items():
        text = re.sub(r"--.*", lambda found: " " * len(found[0]), statement)
        for pattern, by in _WORDS:
            for found in re.finditer(pattern, text):
                after = found.expand(by)
                changed = statement[: found.start()] + after + statement[found.end() :]
                line = statement.count("\n", 0, found.start()) + 1
                context = statement.splitlines()[line - 1].strip()
                before = text[: found.start()].rpartition("\n")[2]
                if by == _OTHER_THAN and not re.search(r"\b(WHERE|AND|ON|WHEN|iif|sum)\b", before):
                    continue  # no condition: SET a = 1
                place = f"{_short(found[0])} in {_short(context)}"
                yield Mutant(name, line, place, after.strip(), changed)
        yield from _without_conditions(name, statement, text)


def _without_conditions(name: str, statement: str, text: str) -> Iterator[Mutant]:
    """Each condition after an AND on a line of its own is left out."""
    condition = r"^\s+AND [^()\n]*(?:\([^()\n]*\))?[^()\n;]*(?=\n|;|$)"
    for found in re.finditer(condition, text, re.MULTILINE):
        changed = statement[: found.start()] + statement[found.end() :]
        line = statement.count("\n", 0, found.start()) + 1
        yield Mutant(name, line, _short(found[0].strip()), "left out", changed)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:69]}…"
