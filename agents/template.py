"""`ChatTemplate`: a model's own chat template, rendered as transformers renders it."""

import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolgym.agents.chat import TemplateRefused, read_json
from toolgym.envs.errors import ConfigurationError

_SHORT = 16  # lengths below this are among the probes
_ROLES = {"system", "developer", "user", "assistant", "tool", "ipython", "model", "function"}


class ChatTemplate:
    """A Jinja template that writes a conversation as text.

    Args:
        source: the template.
        variables: what else it reads: special tokens by name (``bos_token``), and options such as ``enable_thinking``.
        name: for error messages.

    Attributes:
        constants: texts that it may look for in somebody's text.
        reads: the variables that it reads.
        longest_plain: the least number of characters at which it may treat a text otherwise.
        tells_time: whether it reads the clock.
        takes_parts: whether it wants content as a list of parts, as templates of models that see images do.

    Raises:
        ConfigurationError: it is no valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        self.source, self.variables, self.name = source, dict(variables), name
        self.takes_parts, self.tells_time = False, "strftime_now" in source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            self.constants = frozenset(_constants(tree))
            self.reads = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self.longest_plain = min(_lengths(tree), default=sys.maxsize)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the chat template of {name} is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens: bool,
        time: str | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: in the form of OpenAI's chat completions, arguments of calls as objects.
            tools: function schemas.
            opens: whether the assistant's next turn is opened.
            time: what stands wherever the template writes the present time; None: the present time.

        Raises:
            TemplateRefused: the template cannot write this conversation.
        """
        try:
            return self._template.render(
                messages=[_in_parts(message) for message in messages] if self.takes_parts else list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opens,
                **self.variables,
                **({} if time is None else {"strftime_now": lambda form: time}),
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template of {self.name} says: {error}") from error
        except Exception as error:
            raise TemplateRefused(f"the chat template of {self.name} fails: {type(error).__name__}: {error}") from error


def read_template(folder: Path) -> str | None:
    """The chat template that a model folder ships, in any of the places where transformers looks for one.

    Of several named ones that for tools is taken, else the default.

    Raises:
        ConfigurationError: a file cannot be read, or there are several templates and none of them is the default.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{jinja} cannot be read: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file() and (found := read_json(folder / name).get("chat_template")):
            return choose_template(found, str(folder / name))
    return None


def choose_template(found: Any, where: str) -> str:
    """One template out of what a tokenizer has: a text, or several by name.

    Raises:
        ConfigurationError: there are several templates and none of them is for tools or the default.
    """
    if isinstance(found, str):
        return found
    named = found if isinstance(found, Mapping) else {entry["name"]: entry["template"] for entry in found}
    for name in ("tool_use", "default"):
        if name in named:
            return str(named[name])
    raise ConfigurationError(f"{where} has chat templates named {', '.join(named)}, none of them 'default'")


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for trainers; what it wraps is written as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """See `jinja2.ext.Extension`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    # What transformers (utils/chat_template_utils.py) gives every chat template; models are tested against that.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip  # noqa: E501
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _constants(tree: nodes.Template) -> Iterator[str]:
    """The texts that a template may look for in somebody's text: operands of comparisons, arguments of methods."""
    asking: list[nodes.Node] = [*tree.find_all((nodes.Compare, nodes.Test))]
    asking += [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)]
    asking += [kept for kept in tree.find_all(nodes.Filter) if kept.name in ("replace", "split", "startswith")]
    for node in asking:
        for constant in node.find_all(nodes.Const):
            if isinstance(constant.value, str) and constant.value and constant.value not in _ROLES:
                yield constant.value


def _lengths(tree: nodes.Template) -> Iterator[int]:
    """Numbers that a template may compare the length of a text with, or cut it at."""
    for node in tree.find_all((nodes.Compare, nodes.Slice, nodes.Filter, nodes.Call)):
        for constant in node.find_all(nodes.Const):
            if isinstance(constant.value, int) and abs(constant.value) >= _SHORT:
                yield abs(constant.value)
