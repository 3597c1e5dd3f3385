# SPDX-License-Identifier: Apache-2.0
"""What this project uses of vLLM, and how it differs between two releases.

Found by reading syntax trees: nothing of vLLM is imported, so a release whose
dependencies are not installed can be read too.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign

#: Used in ways that no import of ours shows: called by patched code, relied on
#: for the keys of a dictionary, replaced at run time.
ALSO_USED = (
    ("vllm/config/scheduler.py", "SchedulerConfig.get_scheduler_cls"),
    ("vllm/plugins/__init__.py", "load_plugins_by_group"),
    ("vllm/engine/arg_utils.py", "EngineArgs.create_engine_config"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler.schedule"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler._update_waiting_for_remote_kv"),
    *(
        (
            "vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py",
            f"NixlConnectorScheduler.{name}",
        )
        for name in (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "request_finished",
        )
    ),
    (
        "examples/online_serving/disaggregated_serving/disagg_proxy_demo.py",
        "ProxyServer",
    ),
)


@dataclass(frozen=True)
class Use:
    """A symbol of vLLM that we use.

    Attributes:
        path: File of vLLM.
        name: Qualified name in it.
        how: ``imported``, ``overridden``, ``hooked`` or ``read``.
    """

    path: str
    name: str
    how: str


def module_path(tree: Path, module: str) -> str | None:
    """Path of a module's file in a tree of vLLM."""
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if (tree / path).is_file():
            return path
    return None


@cache
def parsed(path: Path) -> ast.Module | None:
    """A file's syntax tree without docstrings, `None` where there is none."""
    try:
        tree = ast.parse(path.read_text())
    except OSError:
        return None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body:
            continue
        first = body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return tree


def find(tree: Path, path: str, name: str) -> Definition | None:
    """The definition of a qualified name in a file."""
    node: ast.AST | None = parsed(tree / path)
    for part in name.split("."):
        node = next(
            (item for item in _body(node) if part in _names(item)),
            None,
        )
        if node is None:
            return None
    assert isinstance(node, Definition | ast.AnnAssign)
    return node  # type: ignore[return-value]


def _body(node: ast.AST | None) -> Iterator[ast.AST]:
    """Definitions directly in a node, those under ``if`` and ``try`` included."""
    for item in getattr(node, "body", []):
        if isinstance(item, ast.If | ast.Try):
            yield from _body(item)
        yield item


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def signature(node: ast.AST) -> str:
    """A function's arguments and result; the bases of a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){result}"
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(map(ast.unparse, node.bases))})"
    return ""


def digest(node: ast.AST) -> str:
    """Of what a definition does: comments, docstrings and layout left out."""
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()


def uses(package: Path, tree: Path) -> list[Use]:
    """What the package uses of a tree of vLLM.

    Args:
        package: Our package.
        tree: vLLM's source tree that it was written for.
    """
    found: dict[tuple[str, str], Use] = {}

    def note(path: str | None, name: str, how: str) -> None:
        if path is not None and find(tree, path, name) is not None:
            found[path, name] = Use(path, name, how)

    for file in sorted(package.rglob("*.py")):
        module = parsed(file)
        assert module is not None
        imported: dict[str, tuple[str, str]] = {}
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module == "vllm" or node.module.startswith("vllm."):
                path = module_path(tree, node.module)
                for alias in node.names:
                    if path is not None:
                        imported[alias.asname or alias.name] = (path, alias.name)
                    note(path, alias.name, "imported")
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in imported:
                        _note_subclass(node, *imported[base.id], note)
    for path, name in ALSO_USED:
        note(path, name, "hooked")
    return sorted(found.values(), key=lambda use: (use.path, use.name))


def _note_subclass(node: ast.ClassDef, path: str, name: str, note: object) -> None:
    """Methods that a subclass overrides, and those it calls."""
    assert callable(note)
    own = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for method in sorted(own):
        note(path, f"{name}.{method}", "overridden")
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
            and part.attr not in own
        ):
            note(path, f"{name}.{part.attr}", "called")


def attributes_read(package: Path, tree: Path) -> dict[str, set[str]]:
    """Attributes of vLLM's objects that our subclasses read from ``self``.

    Returns:
        By file of the base class, the names that neither our class assigns
        nor the base class defines as methods.
    """
    out: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        module = parsed(file)
        assert module is not None
        for node in ast.walk(module):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id == "Scheduler":
                    path = "vllm/v1/core/sched/scheduler.py"
                    names = _self_names(node, ast.Load) - _self_names(node, ast.Store)
                    there = assigned(tree, path, base.id)
                    out.setdefault(path, set()).update(names & there)
    return out


def _self_names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, context)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def assigned(tree: Path, path: str, name: str) -> set[str]:
    """Attributes that a class of vLLM assigns to ``self``."""
    node = find(tree, path, name)
    return _self_names(node, ast.Store) if node is not None else set()


def enclosing(tree_text: str, line: int) -> str:
    """Qualified name of the definition around a line, counted from 0."""
    names: list[str] = []
    node: ast.AST | None
    try:
        node = ast.parse(tree_text)
    except SyntaxError:
        return "?"
    while node is not None:
        inner = None
        for item in getattr(node, "body", []):
            end = getattr(item, "end_lineno", None)
            if (
                isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and end is not None
                and item.lineno - 1 <= line < end
            ):
                inner = item
                names.append(item.name)
        node = inner
    return ".".join(names) or "module level"
