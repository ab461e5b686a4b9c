"""`ChatTemplate`: a model's own chat template, rendered as transformers renders it."""

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolgym.agents.chat import TemplateRefused, read_json
from toolgym.agents.codec import fit
from toolgym.agents.traced import Parts, Slot, Trace, Traced, TracingEnvironment, traced_json, tracing
from toolgym.envs.errors import ConfigurationError

_E = TypeVar("_E", bound=jinja2.Environment)
TIME = "time"  # the field of the present time in a traced rendering


class ChatTemplate:
    """A Jinja template that writes a conversation as text.

    Args:
        source: the template.
        variables: what else it reads: special tokens by name (``bos_token``), and options such as ``enable_thinking``.
        name: for error messages.

    Attributes:
        reads: the variables that it reads.
        takes_parts: whether it wants content as a list of parts, as templates of models that see images do.

    Raises:
        ConfigurationError: it is no valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        if not isinstance(source, str) or fit(source) != source:
            raise ConfigurationError(f"expected the chat template of {name} as text, actual {type(source).__name__}")
        self.source, self.variables, self.name = source, dict(variables), name
        self.takes_parts = False
        environment = _prepared(ImmutableSandboxedEnvironment(**_SETTINGS))
        tracing = _prepared(TracingEnvironment(**_SETTINGS))
        tracing.filters["tojson"] = _traced_tojson
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            self.reads = frozenset(jinja2.meta.find_undeclared_variables(tree)) - set(_assigned(tree))
            self._tracing = tracing.from_tree(tracing.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigurationError(f"the chat template of {name} is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, opens: bool
    ) -> str:
        """The text of a conversation.

        Args:
            messages: in the form of OpenAI's chat completions, arguments of calls as objects.
            tools: function schemas.
            opens: whether the assistant's next turn is opened.

        Raises:
            TemplateRefused: the template cannot write this conversation.
        """
        return str(self._rendered(self._template, messages, tools, opens=opens))

    def trace(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], trace: Trace) -> Parts:
        """The parts of a conversation whose texts are traced, the assistant's next turn opened.

        Args:
            messages: some of whose texts are `Traced`.
            tools: function schemas.
            trace: where it is noted what is asked of texts.

        Raises:
            TemplateRefused: the template cannot write this conversation.
        """
        now = {"strftime_now": lambda form: Traced((Slot(TIME),), trace)}
        with tracing(trace):
            written = self._rendered(self._tracing, messages, tools, opens=True, more=now)
        return written.parts if isinstance(written, Traced) else (written,)

    def _rendered(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        opens: bool,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        try:
            return template.render(
                messages=[_in_parts(message) for message in messages] if self.takes_parts else list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opens,
                **{**self.variables, **more},
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template of {self.name} says: {error}") from error
        except Exception as error:  # a template is a program of somebody else's
            raise TemplateRefused(f"the chat template of {self.name} fails: {type(error).__name__}: {error}") from error


def read_template(folder: Path) -> str | None:
    """The chat template that a model folder ships, in any of the places where transformers looks for one.

    Of several named ones that for tools is taken, else the default.

    Raises:
        ConfigurationError: a file cannot be read, or there are several templates and none of them is the default.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
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
    named: dict[str, Any] = {}
    if isinstance(found, Mapping):
        named = dict(found)
    elif isinstance(found, list) and all(isinstance(entry, Mapping) for entry in found):
        named = {str(entry.get("name")): entry.get("template") for entry in found}
    for name in ("tool_use", "default"):
        if isinstance(named.get(name), str):
            return str(named[name])
    names = ", ".join(map(str, named)) or repr(found)[:60]
    raise ConfigurationError(f"expected one chat template in {where}, or one named 'default', actual {names}")


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


# What transformers (utils/chat_template_utils.py) gives every chat template; models are tested against that.
_SETTINGS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": [_Generation, loopcontrols],
}


def _prepared(environment: _E) -> _E:
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip  # noqa: E501
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _traced_tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> Any:
    return traced_json(value, lambda plain: _tojson(plain, False, **options), as_it_is=not ensure_ascii)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _assigned(tree: nodes.Template) -> Iterator[str]:
    """Names that a template gives values itself, and reads nowhere else."""
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
    defaults = {
        t.node.name for t in tree.find_all(nodes.Test) if t.name == "defined" and isinstance(t.node, nodes.Name)
    }
    filtered = {
        f.node.name
        for f in tree.find_all(nodes.Filter)
        if f.name in ("default", "d") and isinstance(f.node, nodes.Name)
    }
    yield from stored - defaults - filtered
