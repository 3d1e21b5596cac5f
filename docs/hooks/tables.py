"""Fills tables of the documentation from the code.

A line `<!-- settings: module:Struct -->` becomes one table per Struct of that tree: key, type, default and the
docstring under the field. A line `<!-- api: room -->` becomes the public functions and classes of a room, file by
file, with the first sentence of what each says. A line `<!-- metrics -->` becomes the table of `algorithms.metrics`,
a line `<!-- results -->` the last measured rows of every benchmark, and a line `<!-- invariants: room -->` what the
docstrings of the files of a room promise.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = re.compile(r"^<!-- settings: (?P<module>[\w.]+):(?P<name>\w+) -->$", re.MULTILINE)
INVARIANTS = re.compile(r"^<!-- invariants: (?P<room>\w+) -->$", re.MULTILINE)
API = re.compile(r"^<!-- api: (?P<room>\w+) -->$", re.MULTILINE)
PROMISE = re.compile(r"^(?P<number>[A-Z]{2}-\d+): (?P<text>.*(?:\n {6,}.*)*)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Called by MkDocs once. The code of this checkout is documented, whatever is installed."""
    sys.path.insert(0, str(ROOT))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    if "<!-- metrics -->" in markdown:
        markdown = markdown.replace("<!-- metrics -->", importlib.import_module("algorithms.metrics").markdown())
    if "<!-- results -->" in markdown:
        markdown = markdown.replace("<!-- results -->", results())
    markdown = API.sub(lambda m: api(ROOT / m["room"]), markdown)
    markdown = INVARIANTS.sub(lambda m: invariants(ROOT / m["room"]), markdown)
    return SETTINGS.sub(lambda m: settings(getattr(importlib.import_module(m["module"]), m["name"])), markdown)


def results() -> str:
    """The tables of `benchmarks/results/*.json`, each with how it was made."""
    from benchmarks.table import Row, to_markdown

    text = ""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = msgspec.json.decode(path.read_bytes())
        rows = [Row(**{key: row[key] for key in Row.__struct_fields__}) for row in result["rows"]]
        command = result.get("command", f"python -m benchmarks {result['name']}")
        text += f"\n## {result['title']}\n\n`{command}`, {result['date']}, {result['machine']}\n\n{to_markdown(rows)}\n"
    return text


def invariants(room: Path) -> str:
    """The first sentence and the numbered promises of every file that has some."""
    text = ""
    for path in sorted(room.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        promises = [(m["number"], " ".join(m["text"].split())) for m in PROMISE.finditer(docstring)]
        if promises:
            head = " ".join(docstring.partition("\n\n")[0].split())
            rows = "\n".join(f"| {number} | {promise.replace('|', chr(92) + '|')} |" for number, promise in promises)
            text += f"\n## `{room.name}/{path.name}`\n\n{head}\n\n| | |\n| --- | --- |\n{rows}\n"
    return text


def api(room: Path) -> str:
    """One table a file: what it defines for others, and what each is."""
    text = ""
    for path in sorted(room.rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        rows = [row for node in public(module) for row in entries(node)]
        if rows:
            name = ".".join(path.relative_to(room.parent).with_suffix("").parts)
            table = "\n".join(
                f"| `{call.replace('|', chr(92) + '|')}` | {said.replace('|', chr(92) + '|')} |" for call, said in rows
            )
            text += f"\n## `{name}`\n\n{sentence(module)}\n\n| | |\n| --- | --- |\n{table}\n"
    return text


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(module: ast.Module) -> Iterator[Definition]:
    """What a file defines under a name without underscore; with `__all__`, only what stands there."""
    exported: list[str] | None = None
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            exported = ast.literal_eval(node.value)
    for node in module.body:
        if isinstance(node, Definition) and (node.name in exported if exported else not node.name.startswith("_")):
            yield node


def entries(node: Definition, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(how it is called, its first sentence), of a class also those of its methods."""
    if not isinstance(node, ast.ClassDef):
        if sentence(node):
            is_value = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
            call = "" if is_value else f"({arguments(node.args)})"
            yield f"{prefix}{node.name}{call}", sentence(node)
        return
    yield f"class {node.name}", sentence(node)
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
            yield from entries(inner, f"{node.name}.")


def arguments(given: ast.arguments) -> str:
    """The arguments without their types, and without self."""
    for one in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
        if one is not None:
            one.annotation = None
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(given))


def sentence(node: ast.Module | Definition) -> str:
    """The first sentence of a docstring; empty when there is none."""
    paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph)[0].rstrip(":") if paragraph else ""


def settings(root: type[Struct]) -> str:
    """The tables of a tree of settings, the root's first."""
    return "\n".join(table for path, kind in tree(root) for table in section(path, kind))


def tree(kind: type[Struct], path: str = "") -> Iterator[tuple[str, type[Struct]]]:
    """Every table of the job file with its Struct, parents first."""
    yield path, kind
    for field in fields(kind):
        many = get_origin(field.type) in (list, tuple)
        for inner in structs(field.type):
            yield from tree(inner, f"{path}.{field.encode_name}{'[]' if many else ''}".lstrip("."))


def section(path: str, kind: type[Struct]) -> Iterator[str]:
    title = "Top level" if not path else f"[[{path[:-2]}]]" if path.endswith("[]") else f"[{path}]"
    own = [field for field in fields(kind) if not structs(field.type)]
    if not own:
        return
    texts = docstrings(kind)
    yield f"\n### `{title}`\n" if path else f"\n### {title}\n"
    if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
        yield f"{' '.join(inspect.cleandoc(kind.__doc__).split())}\n"
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    for field in own:
        cells = (f"`{field.encode_name}`", f"`{type_text(field.type)}`", default_text(field), texts.get(field.name, ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def structs(annotation: Any) -> list[type[Struct]]:
    """The Structs that an annotation speaks of, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return [annotation]
    return [struct for arg in get_args(annotation) for struct in structs(arg)]


def docstrings(kind: type[Struct]) -> dict[str, str]:
    """Field name -> the string that stands under it in the source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is Struct or not issubclass(base, Struct):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(inspect.cleandoc(text).split())
    return found


def type_text(annotation: Any) -> str:
    """An annotation as a user of TOML reads it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        limits = [
            f"{sign} {value:g}"
            for meta in annotation.__metadata__
            if isinstance(meta, msgspec.Meta)
            for sign, value in ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le))
            if value is not None
        ]
        return " ".join([type_text(args[0]), ", ".join(limits)]).strip()
    if str(origin) == "typing.Literal":
        return " or ".join(f'"{arg}"' if isinstance(arg, str) else str(arg) for arg in args)
    if origin in (list, tuple, set, frozenset):
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return "table"
    if args:
        return " or ".join("none" if arg is type(None) else type_text(arg) for arg in args)
    return {"str": "text", "bool": "true or false", "Any": "any"}.get(
        name := getattr(annotation, "__name__", "any"), name
    )


def default_text(field: FieldInfo) -> str:
    default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
    if default is NODEFAULT:
        return "required"
    if default is None:
        return "none"
    if isinstance(default, (list, tuple, dict, set)) and not default:
        return "empty"
    return f"`{msgspec.json.encode(default).decode()}`"
