"""Puts small faults into functions, one at a time, and says which of them tests find.

    python tools/mutate.py kvjax/block_pool.py tests/test_block_pool.py --count=10 --seed=0

A fault swaps an operator, changes an integer by one, or drops a condition. Each is put into a copy of what git tracks,
where the tests run until the first that fails or for `--seconds`. A fault that survives is a gap in the tests, or
changes nothing that anyone sees: read it.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Fault(NamedTuple):
    """The source of an expression and what replaces it."""

    function: str
    node: ast.expr
    after: str


def faults_of(node: ast.AST) -> Iterator[str]:
    """What an expression may be replaced by."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.unparse(ast.Compare(node.left, [OPERATORS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(OPERATORS[type(node.op)](), node.values))})"
        yield f"({ast.unparse(node.values[0])})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(node.body)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Those that a call evaluates: no annotations, no defaults of other functions, no words of errors."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arguments | ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from expressions(child)


def faults_in(source: str, functions: Sequence[str]) -> list[Fault]:
    """Every fault of the functions named, or of all."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and (not functions or function.name in functions):
            for statement in function.body:
                for node in expressions(ast.Module([statement], [])):
                    found += [Fault(function.name, node, after) for after in faults_of(node)]
                if isinstance(statement, ast.If) and not statement.orelse:
                    found.append(Fault(function.name, statement.test, "False"))
    return found


def changed(source: str, fault: Fault) -> str:
    """The source with a fault; places in a syntax tree count bytes."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    node, raw = fault.node, source.encode()
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
    return (raw[:start] + fault.after.encode() + raw[end:]).decode()


def copy_sources(folder: Path) -> None:
    """Copies what git tracks, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def finds(folder: Path, tests: Sequence[str], seconds: int) -> bool:
    """Whether a test fails, or takes too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {"PYTHONPATH": f"{folder}:{folder / 'interop'}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    """Prints a line for each fault, and how many were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="the file that gets faults")
    parser.add_argument("tests", nargs="+", help="what should find them")
    parser.add_argument("--functions", nargs="*", default=(), help="default: all")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=120, help="for one fault")
    parser.add_argument("--full", action="store_true", help="run the tests that are left to CI too")
    args = parser.parse_args()
    source = (ROOT / args.module).read_text()
    faults = faults_in(source, args.functions)
    chosen = random.Random(args.seed).sample(faults, min(args.count, len(faults)))
    with tempfile.TemporaryDirectory() as name:
        folder, survivors = Path(name), 0
        copy_sources(folder)
        tests = [*args.tests, *(["--full"] if args.full else [])]
        if finds(folder, tests, args.seconds):
            parser.error(f"tests: {args.tests} fail, or take {args.seconds} s, without a fault")
        for fault in chosen:
            (folder / args.module).write_text(changed(source, fault))
            is_found = finds(folder, tests, args.seconds)
            survivors += not is_found
            where = f"{args.module}:{fault.node.lineno} {fault.function}"
            before = ast.get_source_segment(source, fault.node)
            print(f"{'killed  ' if is_found else 'SURVIVED'} {where}: {before} -> {fault.after}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults found, of {len(faults)} in {args.module}")


if __name__ == "__main__":
    main()
