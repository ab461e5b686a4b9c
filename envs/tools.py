"""Tools: a marked function, its JSON schema from type hints and docstring, and the set of an environment's tools."""

import copy
import functools
import inspect
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import docstring_parser
import pydantic
import pydantic_core
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from toolgym.envs.errors import ConfigurationError, ToolError

_MARK = "__toolgym_tool__"
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What the author asked of a tool.

    Attributes:
        name: the name that the model sees; None takes the function's.
        timeout: seconds one call may take; None takes the environment's.
        ends_episode: whether a successful call ends the episode.
    """

    name: str | None = None
    timeout: float | None = None
    ends_episode: bool = False

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigurationError(f"expected a tool timeout above 0 seconds, actual {self.timeout}")


@overload
def tool(function: _F, /) -> _F: ...
@overload
def tool(
    *, name: str | None = None, timeout: float | None = None, ends_episode: bool = False
) -> Callable[[_F], _F]: ...
def tool(
    function: _F | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    ends_episode: bool = False,
) -> _F | Callable[[_F], _F]:
    """Mark a function or method as a tool. Only what is marked is ever shown to the model.

    The name, the description and the schema of the arguments come from the function: its docstring (Google, NumPy
    and reST styles are read) and its type hints. A plain ``def`` runs in a thread of its own, so it may block; an
    ``async def`` runs on the event loop, so it must not.

    Args:
        function: the function, when used without parentheses.
        name: the name the model sees, if it should differ from the function's.
        timeout: seconds that one call may take; the environment's default if not given.
        ends_episode: whether a successful call of this tool ends the episode.
    """
    options = ToolOptions(name, timeout, ends_episode)

    def mark(target: _F) -> _F:
        # Above @staticmethod or @classmethod the mark belongs on the function inside: that is what is looked up.
        setattr(getattr(target, "__func__", target), _MARK, options)
        return target

    return mark if function is None else mark(function)


class _Schema(GenerateJsonSchema):
    """JSON schema without the titles that pydantic derives from names: they cost tokens and say nothing new."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class _Definition(NamedTuple):
    """What a method shows as a tool, whichever object it is bound to."""

    description: str
    schema: dict[str, Any]
    parameters: dict[str, inspect.Parameter]
    model: type[pydantic.BaseModel]


# Thousands of slots have the same methods: their models take milliseconds and hundreds of objects each to build.
_KNOWN: "weakref.WeakKeyDictionary[Callable[..., Any], dict[ToolOptions, _Definition]]" = weakref.WeakKeyDictionary()


class Tool:
    """One tool: its schema for the model, the check of arguments, and the function behind it.

    Args:
        function: any callable whose parameters all have type hints, bound already if it is a method.
        options: see `ToolOptions`; by default what `@tool` left on the function.

    Raises:
        ConfigurationError: no function, a generator, a parameter without a type hint, with one that has no JSON
            schema, or of a kind that cannot be called by name.
    """

    def __init__(self, function: Callable[..., Any], options: ToolOptions | None = None) -> None:
        if not callable(function) or isinstance(function, type):
            raise ConfigurationError(f"expected a function as a tool, actual {function!r:.200}")
        marked: ToolOptions = getattr(function, _MARK, ToolOptions())
        self.options = options or marked
        inner = _inner(function)
        self.name = self.options.name or str(getattr(inner, "__name__", type(function).__name__))
        self.function = function
        self.is_async = inspect.iscoroutinefunction(inner)
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise ConfigurationError(f"tool {self.name!r} is a generator: return what it finds as one value")
        known = _KNOWN.setdefault(inner, {}) if inspect.ismethod(function) else {}
        same = known.get(self.options)
        if same is not None:
            self.description, self.schema = same.description, same.schema
            self._parameters, self._model = same.parameters, same.model
            return
        doc = docstring_parser.parse(inspect.getdoc(inner) or "")
        self.description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
        self._parameters = self._checked_parameters(function)
        self._model = self._build_model({p.arg_name: p.description or "" for p in doc.params})
        self.schema = self._build_schema()
        known[self.options] = _Definition(self.description, self.schema, self._parameters, self._model)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments checked and coerced to the types of the hints.

        Raises:
            ToolError: naming every wrong argument, what was expected and what was given, in words for the model.
        """
        if not isinstance(arguments, Mapping):
            raise ToolError(f"Invalid arguments for {self.name}: expected a JSON object, got {arguments!r:.100}.")
        try:
            # Copied: what a tool does to its arguments must not change the record of the call.
            checked = self._model.model_validate(copy.deepcopy(dict(arguments)))
        except pydantic.ValidationError as error:
            raise ToolError(self._explain(error)) from error
        return {name: getattr(checked, field) for field, name in self._fields()}

    def _fields(self) -> Iterator[tuple[str, str]]:
        # Fields have names of our own and the parameters' names as aliases: a parameter may well be called "json".
        return ((f"arg{k}", name) for k, name in enumerate(self._parameters))

    def _checked_parameters(self, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
        parameters = dict(inspect.signature(function).parameters)
        try:
            hints = typing.get_type_hints(_inner(function), include_extras=True)
        except (NameError, TypeError) as error:
            raise ConfigurationError(f"tool {self.name!r}: a type hint cannot be resolved: {error}") from error
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigurationError(
                    f"tool {self.name!r}: parameter {name!r} is {parameter.kind.description}; the model passes "
                    "arguments by name, so give every argument a name of its own"
                )
            if name not in hints:
                raise ConfigurationError(
                    f"tool {self.name!r}: parameter {name!r} has no type hint; annotate it, e.g. `{name}: str`"
                )
            parameters[name] = parameter.replace(annotation=hints[name])
        return parameters

    def _build_model(self, descriptions: Mapping[str, str]) -> type[pydantic.BaseModel]:
        fields: dict[str, Any] = {}
        for field, name in self._fields():
            parameter = self._parameters[name]
            annotation, default = parameter.annotation, parameter.default
            if isinstance(default, FieldInfo):
                annotation, default = typing.Annotated[annotation, default], default.get_default()
                default = parameter.empty if default is pydantic_core.PydanticUndefined else default
            if descriptions.get(name):
                annotation = typing.Annotated[annotation, pydantic.Field(description=descriptions[name])]
            value = ... if default is parameter.empty else default
            fields[field] = (annotation, pydantic.Field(value, alias=name))
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        try:
            return pydantic.create_model(self.name, __config__=config, **fields)
        except pydantic.errors.PydanticSchemaGenerationError as error:
            raise ConfigurationError(f"tool {self.name!r}: an argument's type has no schema: {error}") from error

    def _build_schema(self) -> dict[str, Any]:
        try:
            parameters = self._model.model_json_schema(schema_generator=_Schema)
        except pydantic.errors.PydanticInvalidForJsonSchema as error:
            raise ConfigurationError(f"tool {self.name!r}: an argument's type has no JSON schema: {error}") from error
        parameters.pop("title", None)
        parameters.pop("additionalProperties", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def _explain(self, error: pydantic.ValidationError) -> str:
        lines = []
        for entry in error.errors(include_url=False):
            where = ".".join(str(part) for part in entry["loc"]) or "arguments"
            given = "" if entry["type"] == "missing" else f" (got {entry['input']!r:.100})"
            lines.append(f"{where}: {entry['msg']}{given}")
        expected = ", ".join(self._parameters) or "none"
        return f"Invalid arguments for {self.name}: {'; '.join(lines)}. Expected arguments: {expected}."


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function behind a method, a partial or a callable object: the one with name, hints and docstring."""
    if isinstance(function, functools.partial):
        return _inner(function.func)
    if not inspect.isroutine(function):
        return type(function).__call__
    inner: Callable[..., Any] = getattr(function, "__func__", function)
    return inner


class Toolset(Mapping[str, Tool]):
    """The tools of one environment by name, in the order in which they were given.

    Raises:
        ConfigurationError: two tools with one name.
    """

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for entry in tools:
            made = entry if isinstance(entry, Tool) else Tool(entry)
            if made.name in self._tools:
                raise ConfigurationError(f"two tools are named {made.name!r}: give one another name, @tool(name=...)")
            self._tools[made.name] = made

    @classmethod
    def of(cls, owner: object) -> "Toolset":
        """The methods of an object that are marked with `@tool`, those of base classes first, as written."""
        names: dict[str, None] = {}
        for kind in reversed(type(owner).__mro__):
            # Looked up on the class, so that an override without the mark is no tool and no property is run.
            names.update(dict.fromkeys(name for name in vars(kind) if hasattr(getattr(type(owner), name, None), _MARK)))
        return cls(getattr(owner, name) for name in names)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as OpenAI function schemas, JSON-ready."""
        return [entry.schema for entry in self._tools.values()]

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
