"""Tools as plain async functions, and an environment in which the policy calls them.

    async def add(a: float, b: float) -> str:
        '''The sum of two numbers.'''
        return str(a + b)

    ToolEnvironment([add], judge)

A call stands in the policy's turn as `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`, its
result in the reply as `<tool_response>3</tool_response>`: the form that Hermes and Qwen models know. A turn without a
call is the answer.

TL-1: what a function raises, and a call that can't be read, is told to the policy; it is no error of the run.
TL-2: arguments are checked against the signature before the function runs.
TL-3: results longer than `max_chars` are cut, and say so.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import operator
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from roles.dialogue import Message
from roles.environment import Reply
from roles.sandbox import run_async
from roles.types import Prompt

Tool = Callable[..., Awaitable[Any]]
Judge = Callable[[Prompt, str], Awaitable[float]]
"""Reward of the final answer."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}


def describe(tool: Tool) -> dict[str, Any]:
    """A function as chat templates and the OpenAI API name it, from its signature and docstring.

    Raises:
        ValueError: it is not async, or a parameter has no type that JSON has.
    """
    if not inspect.iscoroutinefunction(tool):
        raise ValueError(f"tool {tool.__name__}: expected an async function; write 'async def'")
    hints = get_type_hints(tool)
    properties, required = {}, []
    for name, parameter in inspect.signature(tool).parameters.items():
        if hints.get(name) not in _JSON_TYPES:
            raise ValueError(
                f"tool {tool.__name__}: parameter {name}: expected a type of {[t.__name__ for t in _JSON_TYPES]}, got "
                f"{hints.get(name)}"
            )
        properties[name] = {"type": _JSON_TYPES[hints[name]]}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": inspect.getdoc(tool) or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


class ToolEnvironment:
    """A `roles.environment.Environment`: the policy calls tools until it answers.

    Args:
        tools: async functions with annotated parameters.
        judge: reward of the answer, the first turn without a call.
        max_chars: of one result.
    """

    def __init__(self, tools: Sequence[Tool], judge: Judge, *, max_chars: int = 2000) -> None:
        self.descriptions = [describe(tool) for tool in tools]
        """For the chat template, which tells the policy what it may call."""
        self._tools = {tool.__name__: tool for tool in tools}
        self._judge = judge
        self._max_chars = max_chars
        self._prompt: Prompt

    async def reset(self, prompt: Prompt) -> Sequence[Message] | None:
        self._prompt = prompt
        return None

    async def step(self, text: str) -> Reply:
        calls = _CALL.findall(text)
        if not calls:
            return Reply(done=True, reward=await self._judge(self._prompt, text))
        results = await asyncio.gather(*[self._run(call) for call in calls])
        return Reply("\n".join(f"<tool_response>{result}</tool_response>" for result in results), role="user")

    async def close(self) -> None:
        """It holds nothing."""

    async def _run(self, call: str) -> str:
        """The result as text, or what was wrong (TL-1)."""
        try:
            parsed = json.loads(call)
            name, arguments = parsed["name"], parsed.get("arguments", {})
            tool = self._tools[name]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return f"error: not a call of one of {sorted(self._tools)}: {error}"
        try:
            result = str(await tool(**_checked(tool, arguments)))
        except Exception as error:  # TL-1: tools are user code, their arguments a model's
            return f"error: {type(error).__name__}: {error}"
        if len(result) > self._max_chars:
            return f"{result[: self._max_chars]} ... ({len(result) - self._max_chars} characters cut)"
        return result


def _checked(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """TL-2. Raises TypeError or ValidationError."""
    bound = inspect.signature(tool).bind(**arguments)
    hints = get_type_hints(tool)
    return {name: msgspec.convert(value, hints[name]) for name, value in bound.arguments.items()}


class CalculatorEnvironment:
    """A `roles.environment.Environment`: behind each "=" stands the value of what is before it. "=" must be a stop
    string. A turn that ends otherwise is the answer; what is judged is the whole text.

        38 - 19 = |19| - 11 = |8|<answer>8</answer>

    The token with "=" may have a space or a sign behind it: the value goes on from there.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._text = ""
        self._prompt: Prompt

    async def reset(self, prompt: Prompt) -> Sequence[Message] | None:
        self._prompt = prompt
        return None

    async def step(self, text: str) -> Reply:
        self._text += text
        before, _, begun = self._text.rpartition("=")
        if "=" not in text or begun.strip() not in ("", "-"):
            return Reply(done=True, reward=await self._judge(self._prompt, self._text))
        try:
            value = await calculator(re.split(r"[=\n<>:,]", before)[-1].strip())
        except Exception as error:  # TL-1: whatever the text is
            value = f"error: {type(error).__name__}"
        told = ("" if begun else " ") + value.removeprefix(begun.strip())
        self._text += told
        return Reply(told, role="")

    async def close(self) -> None:
        """It holds nothing."""


# --- two tools --------------------------------------------------------------------------------------------------------

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MAX_EXPRESSION = 200


async def calculator(expression: str) -> str:
    """The value of an arithmetic expression of numbers, + - * / // % and parentheses."""
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"expected at most {_MAX_EXPRESSION} characters")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic of numbers")


async def python(code: str) -> str:
    """Run Python code and return what it prints. No network, no files, 5 seconds, 512 MiB."""
    result = await run_async(code, seconds=5.0)
    if result.outcome == "time":
        return "error: it ran for more than 5 seconds"
    return (result.stdout + result.stderr).strip()[:10_000] or "(nothing was printed)"


BY_NAME: dict[str, Tool] = {"calculator": calculator, "python": python}


def tool_environment(judge: Judge, tools: Sequence[str], max_chars: int = 2000) -> ToolEnvironment:
    """As a job file names it.

    Args:
        judge: of the answer.
        tools: names of `BY_NAME`, or `module:function` of an async function.
        max_chars: of one result.

    Raises:
        ValueError: a tool is not there, or no tool.
    """
    return ToolEnvironment([_tool(name) for name in tools], judge, max_chars=max_chars)


def _tool(name: str) -> Tool:
    if name in BY_NAME:
        return BY_NAME[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"tool {name!r}: expected one of {', '.join(BY_NAME)}, or 'module:function'")
    try:
        tool: Tool = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"tool {name!r}: {error}; it must be on the Python path") from error
    return tool
