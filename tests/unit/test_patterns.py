"""No regular expression of ours takes more than linear time (P5).

Each one meets strings made of its own words and punctuation, repeated, in all pairs. A linear
expression reads 16,000 characters in about a millisecond; a quadratic one takes seconds.
"""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import router

AnyPattern = re.Pattern[str] | re.Pattern[bytes]

SIZES = (250, 2_000, 16_000)  # characters; small ones first, a cubic one would never end
MAX_SECONDS = 0.02  # of ours, the slowest takes 2 ms
MAX_ATOMS = 10


def patterns() -> dict[str, AnyPattern]:
    """Every compiled expression that a module of ours keeps, by its name."""
    found: dict[str, AnyPattern] = {}
    for module in pkgutil.walk_packages(router.__path__, "router."):
        if module.name.endswith(".__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, re.Pattern):
                found[f"{module.name}.{name}"] = value
    return found


def attacks(source: str) -> Iterator[str]:
    words = sorted(set(re.findall(r"[A-Za-z]{2,}", source)), key=len)
    marks = sorted(set(re.findall(r"[^\w\s\\]", source)))
    atoms = list(dict.fromkeys(["a", "0", " ", *words[:5], *marks]))[:MAX_ATOMS]
    for size in SIZES:
        for first, second in itertools.product(atoms, repeat=2):
            half = size // 2
            yield first * (half // len(first)) + second * (half // len(second)) + "\n"


def is_searched(name: str) -> bool:
    """Tell whether its module looks for it anywhere in a text, not only at the beginning."""
    module, _, constant = name.rpartition(".")
    source = inspect.getsource(importlib.import_module(module))
    return re.search(rf"\b{constant}\.(search|sub|finditer|findall|split)\b", source) is not None


def is_super_linear(pattern: AnyPattern, *, searched: bool = True) -> bool:
    """Tell whether matching takes too long. A slow moment of the machine does not count."""
    text = pattern.pattern
    source = text.decode("latin-1") if isinstance(text, bytes) else text
    for attack in attacks(source):
        subject = attack.encode() if isinstance(text, bytes) else attack
        if all(seconds(pattern, subject, searched) > MAX_SECONDS for _ in range(3)):
            return True
    return False


def seconds(pattern: Any, subject: str | bytes, searched: bool) -> float:
    began = time.thread_time()
    if searched:
        list(pattern.finditer(subject))
    else:
        pattern.fullmatch(subject)
    return time.thread_time() - began


@pytest.mark.rule("P5")
@pytest.mark.parametrize("name", sorted(patterns()))
def test_a_pattern_takes_linear_time(name: str) -> None:
    assert not is_super_linear(patterns()[name], searched=is_searched(name))


def hidden_patterns(source: str) -> list[int]:
    """The lines with an expression that `patterns` cannot see: not kept by its module."""
    tree = ast.parse(source)
    kept = {id(node.value) for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_of_re(node.func) and id(node) not in kept
    ]


def _is_of_re(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
        and function.attr != "escape"
    )


@pytest.mark.rule("P5")
def test_every_pattern_is_kept_by_its_module_so_that_it_is_checked() -> None:
    root = Path(router.__file__).parent
    found = {
        f"{path.relative_to(root)}:{line}"
        for path in root.rglob("*.py")
        for line in hidden_patterns(path.read_text())
    }

    assert found == set()
    assert hidden_patterns("import re\nA = re.compile('a')\ndef f(): re.sub('a', 'b', 'c')") == [3]


@pytest.mark.rule("P5")
@pytest.mark.parametrize(
    "source",
    [
        r"[?&][^=]*key[^=]*=[^&]*&",
        r"(?<=[?&;])([^=&;#\s]*(?:pass|token|key)[^=&;#\s]*=)[^&;#\s]*",  # once ours: cubic
    ],
)
def test_a_bad_pattern_is_found(source: str) -> None:
    assert len(patterns()) > 20
    assert is_super_linear(re.compile(source))
