"""`Case`: one output of a model and what it says, with the tools that all cases are read with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from toolgym.envs import CallFault, ToolCall


@dataclass(frozen=True)
class Plain:
    """A part of an output whose literals are spelled in ordinary tokens: none of them is a control token."""

    text: str


@dataclass(frozen=True)
class Fault:
    """A call that should be refused; its tool's name is checked where it can be known."""

    kind: CallFault
    name: str | None = None


@dataclass(frozen=True)
class Case:
    """One output.

    Attributes:
        name: what is odd about it.
        said: the raw output; literals of control tokens are control tokens, but for those in `Plain` parts.
        content: what should be shown.
        calls: what should be called, in order.
        reasoning: what should be kept as reasoning.
        ended: whether a stop token follows; else the output was cut.
        prompt: what stands at the prompt's end behind the template's own opening, e.g. an opened reasoning.
        stop: the stop token's literal where the family has several.
    """

    name: str
    said: str | tuple[str | Plain, ...]
    content: str = ""
    calls: tuple[ToolCall | Fault, ...] = ()
    reasoning: str | None = None
    ended: bool = True
    prompt: str = ""
    stop: str | None = None

    @property
    def parts(self) -> tuple[str | Plain, ...]:
        """The output in parts."""
        return (self.said,) if isinstance(self.said, str) else self.said

    @property
    def text(self) -> str:
        """The output as somebody reads it."""
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)


@dataclass(frozen=True)
class Family:
    """The cases of one family.

    Attributes:
        name: of the family.
        template: of TRL's; None for one that the test brings along.
        cases: its cases.
        markers: literals and words of its syntax, which are neither text nor arguments.
        syntax: where the template does not show it.
    """

    name: str
    template: str | None
    cases: tuple[Case, ...] = field(repr=False)
    markers: tuple[str, ...]
    syntax: str | None = None


@dataclass(frozen=True)
class Value:
    """Arguments, or the value of one, as they are written and what they should be read as."""

    name: str
    written: str
    read: Any = field(hash=False)
    key: str = ""


def call(name: str = "look_up", **arguments: Any) -> tuple[ToolCall]:
    """The one call that a case should be read as."""
    return (ToolCall(name, arguments),)


def fault(kind: CallFault, name: str | None = None) -> tuple[Fault]:
    """The one refusal that a case should be read as."""
    return (Fault(kind, name),)


def arguments_of(
    values: Iterable[Value], wrap: Callable[[str], str], *, named: bool, form: str = ""
) -> tuple[Case, ...]:
    """Cases of arguments of ``look_up``, each written by a family.

    Args:
        values: whose texts are whole objects of arguments.
        wrap: a family's call with these arguments.
        named: whether the name can be known where the arguments are not JSON.
        form: of the call, where a family has several.
    """
    cases = []
    for value in values:
        if isinstance(value.read, CallFault):
            known = named or value.read is CallFault.BAD_ARGUMENTS
            calls: tuple[ToolCall | Fault, ...] = fault(value.read, "look_up" if known else None)
        else:
            calls = (ToolCall("look_up", value.read),)
        cases.append(Case(f"{value.name}{form}", wrap(value.written), calls=calls))
    return tuple(cases)


def values_of(values: Iterable[Value], wrap: Callable[[str, str], str]) -> tuple[Case, ...]:
    """Cases of one argument of ``set_up``, each written by a family: ``wrap(key, written)``."""
    cases = []
    for value in values:
        key = value.key or "other"
        if isinstance(value.read, CallFault):
            calls: tuple[ToolCall | Fault, ...] = fault(value.read)
        else:
            calls = (ToolCall("set_up", {key: value.read}),)
        cases.append(Case(value.name, wrap(key, value.written), calls=calls))
    return tuple(cases)


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    _tool("look_up", text={"type": "string"}, count={"type": "integer"}),
    _tool("run", code={"type": "string"}),
    _tool("clock"),
    _tool(
        "set_up",
        zip={"type": "string"},
        text={"type": "string"},
        code={"type": "string"},
        count={"type": "integer"},
        ratio={"type": "number"},
        flag={"type": "boolean"},
        items={"type": "array"},
        mapping={"type": "object"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
        several={"type": ["integer", "null"]},
        mode={"enum": ["1", "2"]},
        other={},
    ),
]
