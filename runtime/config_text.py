"""The text side of settings: TOML and YAML in, TOML out. What the keys mean is `runtime.config`'s business.

CT-1: YAML is read safely and without YAML 1.1's surprises: `on` is text, `1e-3` is a number, a key written twice fails.
CT-2: what `render` writes, TOML reads back equal; a value that TOML can't hold is an error, not a guess.

TOML has no null: where a field may be None, the text "none" says so.
"""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

PathKey = str | int
NONE = "none"
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ConfigError(ValueError):
    """Settings that can't be used: one line per problem in `problems`, each naming where, what and how to mend it."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        if len(self.problems) == 1:
            text = f"{source}: {self.problems[0]}"
        else:
            text = f"{source}: {len(self.problems)} problems\n" + "\n".join(f"  {p}" for p in self.problems)
        super().__init__(text)


# --- in ---------------------------------------------------------------------------------------------------------------


def parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, [f"not valid TOML: {error}"]) from error


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe, and without YAML 1.1's surprises: `on` is text, `1e-3` is a number, a key written twice is an error."""

        yaml_implicit_resolvers = {
            first: [(tag, regexp) for tag, regexp in pairs if not tag.endswith((":bool", ":float"))]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(source, [f"line {node.start_mark.line + 1}: the key {key!r} is written twice"])
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
    number = r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|nan))$"
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(number), list("-+.0123456789"))
    try:
        data = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(source, [f"not valid YAML: {' '.join(str(error).split())}"]) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(source, [f"expected a table of settings at the top, got {describe(data)}"])
    return data


# --- out --------------------------------------------------------------------------------------------------------------


def render(
    config: Struct, *, derived: Mapping[str, str] = types.MappingProxyType({}), overrides: Sequence[str] = ()
) -> str:
    """The whole tree as TOML, defaults included, with comments on where values come from.

    Args:
        derived: full path -> explanation. Of a key of the tree it becomes a comment behind the value; of any other
            name, such as a property, a comment line in its table (`{"rollout.slots": "64 = (S + 1) * 32"}`).
        overrides: the overrides that `load` was given; their keys are marked.

    Raises:
        ValueError: a value that TOML can't hold.
    """
    notes = {text.partition("=")[0].strip(): "from the command line" for text in overrides}
    notes |= {path: f"derived: {text}" for path, text in derived.items()}
    lines = _render_table(config, (), notes)
    return "\n".join(lines).strip("\n") + "\n"


def _render_table(table: Struct | Mapping[str, Any], path: tuple[PathKey, ...], notes: dict[str, str]) -> list[str]:
    plain: list[str] = []
    nested: list[str] = []
    entries = _entries(table)
    heading = ".".join(_key(str(key)) for key in path if not isinstance(key, int))
    for key, value, default in entries:
        here = (*path, key)
        note = notes.get(show_path(here))
        title = f"{heading}.{_key(key)}" if heading else _key(key)
        behind = f"  # {note}" if note else ""
        is_tables = isinstance(value, (list, tuple)) and value and all(isinstance(item, Struct) for item in value)
        if isinstance(value, Struct) or (isinstance(value, Mapping) and value):
            nested += ["", f"[{title}]{behind}", *_render_table(value, here, notes)]
        elif is_tables:
            for index, item in enumerate(value):
                nested += ["", f"[[{title}]]{behind}", *_render_table(item, (*here, index), notes)]
        elif value is None and isinstance(table, Struct):
            plain.append(
                f"# {_key(key)} is unset{f' ({note})' if note else ''}"
                if default is None
                else f'{_key(key)} = "{NONE}"{behind}'
            )
        else:
            plain.append(f"{_key(key)} = {_inline(value, here)}{behind}")
    names = {key for key, _, _ in entries}
    prefix = f"{show_path(path)}." if path else ""
    for name, note in notes.items():
        last = name.removeprefix(prefix)
        if name.startswith(prefix) and BARE_KEY.fullmatch(last) and last not in names:
            plain.append(f"# {last}: {note.removeprefix('derived: ')}")
    return plain + nested


def _entries(table: Struct | Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, value and default of everything in a table, the tag of a union member first."""
    if not isinstance(table, Struct):
        return [(str(key), value, NODEFAULT) for key, value in table.items()]
    tag_field, tag = table.__struct_config__.tag_field, table.__struct_config__.tag
    tags = [(tag_field, tag, NODEFAULT)] if tag_field else []
    return tags + [(f.encode_name, getattr(table, f.name), default_of(f)) for f in fields(table)]


def _inline(value: Any, path: tuple[PathKey, ...]) -> str:
    if isinstance(value, (Struct, Mapping)):
        entries = _entries(value)
        if isinstance(value, Struct):
            entries = [(k, NONE if v is None else v, d) for k, v, d in entries if v is not None or d is not None]
        return "{" + ", ".join(f"{_key(k)} = {_inline(v, (*path, k))}" for k, v, _ in entries) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        parts = [_inline(item, (*path, index)) for index, item in enumerate(items)]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= 100 else "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
    if isinstance(value, (str, bool, int, float)) and type(value) in (str, bool, int, float):
        return scalar(value)
    if value is None:
        raise ValueError(f"{show_path(path)}: TOML has no null, so this value can't be written; leave the key out")
    builtin = msgspec.to_builtins(value, enc_hook=encode_path)
    return _inline(builtin, path)


def scalar(value: str | bool | int | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else scalar(key)


def show_path(path: Sequence[PathKey]) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f"{'.' if text else ''}{_key(key)}"
    return text


def describe(value: Any) -> str:
    """A value in the user's words, short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    shown = "none" if value is None else scalar(value) if isinstance(value, (str, bool, int, float)) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def default_of(field: FieldInfo) -> Any:
    """The default of a field, made anew where it has a factory; NODEFAULT where it must be written."""
    if field.default is not NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not NODEFAULT else NODEFAULT


def encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"settings of type {type(value).__name__} are not supported")
