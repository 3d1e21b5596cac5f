"""Settings: a TOML or YAML file becomes one tree of Structs, or an error that a person can act on.

Generic over the Struct type: what the settings mean is not known here.

CF-1: a key that the type does not have is an error; nothing that was written is ever ignored.
CF-2: what is not written keeps its default, also inside a table that is written in part.
CF-3: an override `a.b[0].c=value` does what writing it in the file would do.
CF-4: all problems of a file and its overrides are reported together, each with its full path, expected and got.
CF-5: `loads(render(tree), Type)` gives an equal tree.
"""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

from runtime.config_text import (
    NONE,
    ConfigError,
    PathKey,
    default_of,
    describe,
    encode_path,
    parse_toml,
    parse_yaml,
    render,
    show_path,
)

__all__ = ["ConfigError", "is_job_file", "load", "loads", "parse_override", "render"]

T = TypeVar("T", bound=Struct)

LANGUAGES: dict[str, Literal["toml", "yaml"]] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
"""Of job files, by the end of their name."""


def load(path: str | Path | None, config_type: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a job file (`.toml`, `.yaml` or `.yml`), apply overrides, check everything.

    Args:
        path: the file; None means no file, every value at its default.
        overrides: texts `a.b=value`; see `parse_override`.

    Raises:
        ConfigError: the file can't be read or parsed, or a key or value does not fit `config_type`.
    """
    if path is None:
        return loads("", config_type, overrides, source="defaults")
    path = Path(path)
    if path.is_dir():
        raise ConfigError(str(path), ["a folder, expected a job file; to go on with a run say --resume FOLDER"])
    if not is_job_file(path):
        problem = "no job file, whose name would end in .toml, .yaml or .yml, and no override, which would be key=value"
        raise ConfigError(str(path), [problem])
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(str(path), [f"can't be read: {reason}"]) from error
    return loads(text, config_type, overrides, source=str(path), language=LANGUAGES[path.suffix])


def is_job_file(path: str | Path) -> bool:
    """Whether a name is that of a file which `load` reads."""
    return Path(path).suffix in LANGUAGES


def loads(
    text: str,
    config_type: type[T],
    overrides: Sequence[str] = (),
    *,
    source: str = "settings",
    language: Literal["toml", "yaml"] = "toml",
) -> T:
    """`load` from text; `source` is what errors call it.

    Raises:
        ConfigError: as for `load`.
    """
    data = parse_toml(text, source) if language == "toml" else parse_yaml(text, source)
    check = _Check(config_type)
    for override in overrides:
        try:
            path, value = parse_override(override, config_type)
            _put(data, path, value, config_type)
        except ValueError as error:
            check.problems.append(f"override {override!r}: {error}")
        else:
            check.overridden[path] = override
    resolved = check.struct(data, config_type, NODEFAULT, ())
    if check.problems:
        raise ConfigError(source, check.problems)
    return msgspec.convert(resolved, config_type, dec_hook=_decode_path)


# --- overrides --------------------------------------------------------------------------------------------------------


def parse_override(text: str, config_type: type[Struct] | None = None) -> tuple[tuple[PathKey, ...], Any]:
    """Split `a.b[0]."c d"=value` into a path and a value.

    The value is written as in TOML (`3`, `1e-3`, `true`, `"text"`, `[1, 2]`, `{a = 1}`); anything that is not TOML is
    text as it stands. Where `config_type` wants text at that path, `name=123` needs no quotes.

    Raises:
        ValueError: no `=`, a key that can't be read, or a value that starts like a list, table or string and is none.
    """
    match = re.match(r"((?:\"[^\"]*\"|[^=\"])*)=(.*)", text, re.DOTALL)
    if not match:
        raise ValueError("expected key=value, such as trainer.learning_rate=1e-3")
    key_text, value_text = match[1].strip(), match[2].strip()
    path: list[PathKey] = []
    position = 0
    segment = re.compile(r"(?:(?P<dot>\.)?(?:(?P<bare>[A-Za-z0-9_-]+)|\"(?P<quoted>[^\"]*)\"))|\[(?P<index>\d+)\]")
    while position < len(key_text):
        found = segment.match(key_text, position)
        if not found or (found["index"] is None and bool(found["dot"]) != bool(path)) or (found["index"] and not path):
            raise ValueError(f"can't read the key {key_text!r}; expected something like a.b or a.list[0].b")
        key = found["bare"] if found["bare"] is not None else found["quoted"]
        path.append(key if found["index"] is None else int(found["index"]))
        position = found.end()
    if not path:
        raise ValueError("the key before '=' is empty")
    return tuple(path), _override_value(value_text, _type_at(config_type, path) if config_type else Any)


def _override_value(text: str, annotation: Any) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ValueError(f"the value is not valid TOML: {error}") from error
        return text
    value = parsed["value"]
    if len(parsed) > 1:  # a line break in the text started another key
        return text
    wants_text = set(_members(annotation)) <= {str, type(None)}
    return text if wants_text and not isinstance(value, str) else value


def _put(data: dict[str, Any], path: Sequence[PathKey], value: Any, config_type: type[Struct]) -> None:
    """Set `value` at `path`, making tables on the way; a list that is at its default is written out first."""
    here: Any = data
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        where = show_path(path[:depth])
        if isinstance(key, int):
            if not isinstance(here, list):
                raise ValueError(f"{where} is not a list, so it has no item [{key}]")
            if key >= len(here):
                raise ValueError(
                    f"{where} has {len(here)} items, so [{key}] does not exist; the last is [{len(here) - 1}]"
                )
        elif not isinstance(here, dict):
            raise ValueError(f"{where} is not a table, so it has no key {key!r}")
        elif not last and key not in here:
            default = _default_at(config_type, path[: depth + 1])
            is_list = isinstance(default, (list, tuple))
            here[key] = msgspec.to_builtins(list(default), enc_hook=encode_path) if is_list else {}
        if last:
            here[key] = value
        else:
            here = here[key]


# --- what a type says -------------------------------------------------------------------------------------------------


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself. `Annotated` is looked through."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(member for arg in get_args(annotation) for member in _members(arg))
    return (annotation,)


def _structs(annotation: Any) -> list[type[Struct]]:
    return [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, Struct)]


def _item_type(annotation: Any) -> Any:
    """The item type of a list or tuple annotation, the value type of a dict annotation; else Any."""
    for member in _members(annotation):
        args = get_args(member)
        if get_origin(member) in (list, tuple, Sequence, set, frozenset) and args:
            return args[0]
        if get_origin(member) in (dict, Mapping) and args:
            return args[1]
    return Any


def _field(struct_type: type[Struct], key: PathKey) -> FieldInfo | None:
    return next((field for field in fields(struct_type) if field.encode_name == key), None)


def _type_at(config_type: Any, path: Sequence[PathKey]) -> Any:
    annotation = config_type
    for key in path:
        found = [field for struct in _structs(annotation) if (field := _field(struct, key))]
        annotation = found[0].type if found else _item_type(annotation)
    return annotation


def _default_at(config_type: type[Struct], path: Sequence[PathKey]) -> Any:
    """The default at a path of keys, looking into the default of an outer field first."""
    annotation: Any = config_type
    default: Any = NODEFAULT
    for key in path:
        if isinstance(default, Struct) and (field := _field(type(default), key)):
            annotation, default = field.type, getattr(default, field.name)
            continue
        found = [field for struct in _structs(annotation) if (field := _field(struct, key))]
        if not found:
            return NODEFAULT
        annotation, default = found[0].type, default_of(found[0])
    return default


def _places(struct_type: type[Struct], name: str, prefix: str = "", seen: tuple[type, ...] = ()) -> Iterator[str]:
    """Full paths at which the tree has a key of this name."""
    if struct_type in seen:
        return
    for field in fields(struct_type):
        path = f"{prefix}{field.encode_name}"
        if field.encode_name == name:
            yield path
        for inner in _structs(field.type):
            yield from _places(inner, name, f"{path}.", (*seen, struct_type))


# --- checking ---------------------------------------------------------------------------------------------------------


class _Check:
    """Walks data and type together, collects every problem and fills in defaults (CF-2)."""

    def __init__(self, root: type[Struct]) -> None:
        self.root = root
        self.problems: list[str] = []
        self.overridden: dict[tuple[PathKey, ...], str] = {}

    def report(self, path: tuple[PathKey, ...], text: str, inner: str = "") -> None:
        """Note a problem; `inner` is the rest of its path as msgspec writes it, in our notation too."""
        where = (show_path(path) + inner).lstrip(".")
        line = f"{where}: {text}" if where else text
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.overridden:
                line += f" (from the override {self.overridden[path[:depth]]!r})"
                break
        self.problems.append(line)

    def value(self, value: Any, annotation: Any, default: Any, path: tuple[PathKey, ...]) -> Any:
        optional = type(None) in _members(annotation)
        if optional and (value is None or value == NONE):
            return None
        structs = _structs(annotation)
        if structs and isinstance(value, dict):
            chosen = self.choose(value, structs, path)
            return value if chosen is None else self.struct(value, chosen, default, path)
        item = _item_type(annotation)
        if isinstance(value, list) and _structs(item):
            return [self.value(each, item, NODEFAULT, (*path, i)) for i, each in enumerate(value)]
        if isinstance(value, dict) and _structs(item):
            return {key: self.value(each, item, NODEFAULT, (*path, str(key))) for key, each in value.items()}
        if structs and len(structs) == len(_members(annotation)) - optional:
            self.report(path, f"expected a table, got {describe(value)}")
            return value
        self.convert(value, annotation, path)
        return value

    def choose(
        self, value: dict[str, Any], structs: list[type[Struct]], path: tuple[PathKey, ...]
    ) -> type[Struct] | None:
        """Which member of a union of Structs a table means, told by its tag."""
        if len(structs) == 1:
            return structs[0]
        tag_field = str(structs[0].__struct_config__.tag_field)
        tags = {struct.__struct_config__.tag: struct for struct in structs}
        if value.get(tag_field) in tags:
            return tags[value[tag_field]]
        known = ", ".join(describe(tag) for tag in tags)
        got = describe(value[tag_field]) if tag_field in value else "nothing"
        self.report((*path, tag_field), f"expected one of {known}, got {got}")
        return None

    def struct(self, value: dict[str, Any], kind: type[Struct], default: Any, path: tuple[PathKey, ...]) -> Any:
        before = len(self.problems)
        known = {field.encode_name: field for field in fields(kind)}
        tag_field = kind.__struct_config__.tag_field
        inherit = default if type(default) is kind else None
        resolved: dict[str, Any] = {tag_field: kind.__struct_config__.tag} if tag_field else {}
        for key in value:
            if key not in known and key != tag_field:
                self.report((*path, str(key)), self.unknown(str(key), list(known), path))
        for name, field in known.items():
            outer = getattr(inherit, field.name) if inherit is not None else default_of(field)
            if name in value:
                resolved[name] = self.value(value[name], field.type, outer, (*path, name))
            elif inherit is not None:
                resolved[name] = msgspec.to_builtins(outer, enc_hook=encode_path)
            elif field.required:
                self.report((*path, name), f"missing; expected {_expected(field.type)}")
        if len(self.problems) == before:
            # The fields fit one by one; now what the Struct itself demands of them together.
            self.convert(resolved, kind, path)
        return resolved

    def unknown(self, key: str, known: list[str], path: tuple[PathKey, ...]) -> str:
        table = f"[{show_path(path)}]" if path else "the top level"
        near = get_close_matches(key, known, n=1, cutoff=0.6)
        elsewhere = [] if near else list(_places(self.root, key))
        hint = f"; did you mean {near[0]!r}?" if near else f"; it is known as {elsewhere[0]!r}." if elsewhere else "."
        return f"unknown key{hint} Keys of {table}: {', '.join(sorted(known)) or '(none)'}"

    def convert(self, value: Any, annotation: Any, path: tuple[PathKey, ...]) -> None:
        try:
            msgspec.convert(value, annotation, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            text, _, inner = str(error).partition(" - at `$")
            inner = inner.rstrip("`")
            if inner and isinstance(value, list) and (index := re.fullmatch(r"\[(\d+)\]", inner)):
                # One item of a list: told as if it stood alone.
                self.convert(value[int(index[1])], _item_type(annotation), (*path, int(index[1])))
                return
            choices = [choice for m in _members(annotation) if get_origin(m) is Literal for choice in get_args(m)]
            if choices and not inner:
                near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
                text = f"expected one of {', '.join(describe(c) for c in choices)}, got {describe(value)}"
                text += f"; did you mean {near[0]!r}?" if near else ""
            elif text.startswith("Expected"):
                text = text.replace("`", "").replace("Expected", "expected", 1)
                text = re.sub(r"\bobject\b", "table", re.sub(r"\barray\b", "list", text))
                if not inner:
                    text = f"{text.partition(', got ')[0]}, got {describe(value)}"
            self.report(path, text, inner)


def _expected(annotation: Any) -> str:
    if _structs(annotation):
        return "a table"
    return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        if isinstance(value, str):
            return kind(value)
        raise ValueError(f"expected a path as text, got {describe(value)}")
    raise NotImplementedError(f"settings of type {kind.__name__} are not supported")
