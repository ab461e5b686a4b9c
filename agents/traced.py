"""`Traced`: text that remembers where it came from while a template works on it.

A template is rendered with traced texts in the place of real ones. What comes out says which text stands where and
what the template did to it on the way (stripped it, wrote it as JSON); and every question that the template asked about
a text (whether it contains, begins with, ends with or equals another, how long it is) is noted with its usual answer.
That holds for any text for which the questions have the same answers. Whatever else a template does with a text cannot
be foreseen: that is noted as well, and then each text is rendered by itself.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jinja2 import Environment, nodes, pass_eval_context
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OPEN, _CLOSE = "\ufdd5", "\ufdd6"  # around what a traced text is to code that does not trace


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a text.

    Attributes:
        field: which text.
        transforms: what is done to it, in order.
    """

    field: Any
    transforms: tuple[Callable[[str], str], ...] = ()

    def fill(self, texts: Mapping[Any, str]) -> str:
        """The text as the template writes it."""
        text = texts[self.field]
        for transform in self.transforms:
            text = transform(text)
        return text


Parts: TypeAlias = tuple[str | Slot, ...]


def fill(parts: Parts, texts: Mapping[Any, str]) -> str:
    """Text of parts, with these texts in their slots."""
    return "".join(part.fill(texts) if isinstance(part, Slot) else part for part in parts)


@dataclass(frozen=True, slots=True)
class Question:
    """What a template asked about texts, and the answer on which the rest depends."""

    ask: Callable[[Mapping[Any, str]], bool]
    answer: bool

    def holds(self, texts: Mapping[Any, str]) -> bool:
        """Whether these texts have the same answer."""
        return self.ask(texts) is self.answer


@dataclass
class Trace:
    """What was noted during one rendering.

    Attributes:
        usual: stands for a text where a question is asked: one without anything special in it.
        questions: asked about texts.
        unforeseen: what a template did that cannot be foreseen for other texts.
    """

    usual: str = "x"
    questions: list[Question] = field(default_factory=list)
    unforeseen: list[str] = field(default_factory=list)

    def ask(self, ask: Callable[[Mapping[Any, str]], bool]) -> bool:
        """Note a question; its usual answer."""
        answer = ask(_Usual(self.usual))
        self.questions.append(Question(ask, answer))
        return answer


_current: contextvars.ContextVar[Trace] = contextvars.ContextVar("trace")


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Note into a trace also what becomes of texts that were lost sight of."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


def _lstrip(text: str) -> str:
    return text.lstrip()


def _rstrip(text: str) -> str:
    return text.rstrip()


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Traced(str):
    """A text in parts, some of them slots. As a str it is never empty.

    Args:
        parts: what it is made of.
        trace: where questions are noted.
    """

    __slots__ = ("parts", "trace")
    parts: Parts
    trace: Trace

    def __new__(cls, parts: Iterable[str | Slot], trace: Trace) -> "Traced":
        """Made of parts; neighbouring texts become one."""
        merged: list[str | Slot] = []
        for part in parts:
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif part != "":
                merged.append(part)
        made = super().__new__(cls, f"{_OPEN}{trace.usual}{_CLOSE}")
        made.parts, made.trace = tuple(merged), trace
        return made

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: str) -> Any:
        return joined((self, other))

    def __radd__(self, other: str) -> Any:
        return joined((other, self))

    def __contains__(self, item: object) -> bool:
        return self._asked(lambda text: str(item) in text, item)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Traced):
            mine, others = self.parts, other.parts
            same = mine == others
            self.trace.questions.append(Question(lambda texts: fill(mine, texts) == fill(others, texts), same))
            return same
        return self._asked(lambda text: text == other, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self.trace.unforeseen.append("looked up")
        return super().__hash__()

    def __iter__(self) -> Iterator[str]:
        """Asking whether it can be iterated is harmless; doing so is not."""
        yield from self._unforeseen("iterated")

    def startswith(self, prefix: Any, *args: Any) -> bool:
        """See `str.startswith`."""
        return self._asked(lambda text: text.startswith(prefix, *args), prefix)

    def endswith(self, suffix: Any, *args: Any) -> bool:
        """See `str.endswith`."""
        return self._asked(lambda text: text.endswith(suffix, *args), suffix)

    def strip(self, chars: str | None = None) -> str:
        """See `str.strip`."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        """See `str.lstrip`. Texts are not only white space, so their beginning is where stripping ends."""
        if chars is not None:
            return self._unforeseen("stripped of characters")
        parts = list(self.parts)
        while parts and isinstance(parts[0], str) and not parts[0].strip():
            parts.pop(0)
        first = parts[0]
        parts[0] = Slot(first.field, (*first.transforms, _lstrip)) if isinstance(first, Slot) else first.lstrip()
        return Traced(parts, self.trace)

    def rstrip(self, chars: str | None = None) -> str:
        """See `str.rstrip`."""
        if chars is not None:
            return self._unforeseen("stripped of characters")
        parts = list(self.parts)
        while parts and isinstance(parts[-1], str) and not parts[-1].strip():
            parts.pop()
        last = parts[-1]
        parts[-1] = Slot(last.field, (*last.transforms, _rstrip)) if isinstance(last, Slot) else last.rstrip()
        return Traced(parts, self.trace)

    def in_json(self) -> "Traced":
        """Itself within a JSON string: escaping is by character, so each part by itself."""
        escaped = (Slot(p.field, (*p.transforms, _json)) if isinstance(p, Slot) else _json(p) for p in self.parts)
        return Traced(escaped, self.trace)

    def _asked(self, ask: Callable[[str], bool], about: object) -> bool:
        if isinstance(about, Traced):
            self.trace.unforeseen.append("looked for in another text")
        if isinstance(about, Traced) or not isinstance(about, str | tuple):
            return False
        return self.trace.ask(lambda texts: ask(fill(self.parts, texts)))

    def _unforeseen(self, what: str) -> str:
        self.trace.unforeseen.append(what)
        return fill(self.parts, _Usual(self.trace.usual))


class TracedLength(int):
    """The length of a traced text: comparisons with it are noted as questions."""

    text: Traced

    def of(self, texts: Mapping[Any, str]) -> int:
        """The length with these texts."""
        return len(fill(self.text.parts, texts))

    def __lt__(self, other: int) -> bool:
        return self.text.trace.ask(lambda texts: self.of(texts) < _number(other, texts))

    def __le__(self, other: int) -> bool:
        return self.text.trace.ask(lambda texts: self.of(texts) <= _number(other, texts))

    def __gt__(self, other: int) -> bool:
        return not self <= other

    def __ge__(self, other: int) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        return self.text.trace.ask(lambda texts: self.of(texts) == _number(other, texts))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        self.text.trace.unforeseen.append("length looked up")
        return 0


def _number(value: Any, texts: Mapping[Any, str]) -> Any:
    return value.of(texts) if isinstance(value, TracedLength) else value


def traced_length(value: Any) -> int:
    """The length of anything, as Jinja's filter has it."""
    if not isinstance(value, Traced):
        return len(value)
    length = TracedLength(len(fill(value.parts, _Usual(value.trace.usual))))
    length.text = value
    return length


class _Usual(dict[Any, str]):
    def __init__(self, usual: str) -> None:
        self._usual = usual

    def __missing__(self, key: Any) -> str:
        return self._usual


def _refuse_the_rest() -> None:
    """All that a str or a length can do and that is not foreseen above is noted, and done on a usual text."""

    def noting(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, Traced):
                return getattr(self._unforeseen(name), name)(*args, **kwargs)
            self.text.trace.unforeseen.append(f"length {name}")
            return getattr(int, name)(self, *args, **kwargs)

        return method

    own = {"__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__init_subclass__"}
    own |= {"__subclasshook__", "__doc__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__sizeof__"}
    for kind, base in ((Traced, str), (TracedLength, int)):
        for name in dir(base):
            if name not in own and name not in vars(kind) and callable(getattr(base, name)):
                setattr(kind, name, noting(name))


_refuse_the_rest()


def joined(texts: Iterable[Any]) -> Any:
    """Texts one after the other: traced if one of them is."""
    pieces = [text if isinstance(text, str) else str(text) for text in texts]
    trace = next((piece.trace for piece in pieces if isinstance(piece, Traced)), None)
    if trace is None:
        whole = "".join(pieces)
        if _OPEN in whole:
            _current.get().unforeseen.append("went through something that does not trace")
        return whole
    parts: list[str | Slot] = []
    for piece in pieces:
        if isinstance(piece, Traced):
            parts += piece.parts
            continue
        if _OPEN in piece:
            trace.unforeseen.append("went through something that does not trace")
        parts.append(piece)
    return Traced(parts, trace)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment in which joined texts stay traced. Templates must be compiled by `from_tree`."""

    concat = staticmethod(joined)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for kind, known in ((self.filters, _FILTERS), (self.tests, _TESTS)):
            for name, function in list(kind.items()):
                kind[name] = _watched(name, function, known)
        self.filters["join"] = _join_with(self.filters["join"])
        self.filters["_joined"], self.filters["_in"] = joined, _contained
        self.filters["length"] = self.filters["count"] = traced_length

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Watch what is called with traced texts, but for the template's own macros."""
        own = isinstance(function, Macro | type(Namespace)) or isinstance(getattr(function, "__self__", None), Traced)
        given = [value for key, value in kwargs.items() if not key.startswith("_")]  # Jinja adds some of its own
        if not own and _holds_traced((args, given)):
            _current.get().unforeseen.append("called with a text")
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Watch operators that do not trace."""
        if _holds_traced((left, right)):
            _current.get().unforeseen.append(f"operator {operator}")
        return super().call_binop(context, operator, left, right)

    intercepted_binops = frozenset(("%", "*"))

    def from_tree(self, tree: nodes.Template) -> Any:
        """A template of its parsed source."""
        _replace_concatenations(tree)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None), None)


def _replace_concatenations(node: nodes.Node) -> None:
    """``a ~ b`` is compiled to a join of Jinja's own, which does not trace."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_without_concatenation(part) for part in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _without_concatenation(value))
    for child in node.iter_child_nodes():
        _replace_concatenations(child)


def _without_concatenation(node: Any) -> Any:
    if isinstance(node, nodes.Concat):
        return _filtered(list(node.nodes), "_joined", node)
    if isinstance(node, nodes.Compare) and len(node.ops) == 1 and node.ops[0].op in ("in", "notin"):
        found = _filtered([node.expr, node.ops[0].expr], "_in", node)
        if node.ops[0].op == "in":
            return found
        assert node.environment is not None  # the parser has set it
        return nodes.Not(found).set_environment(node.environment).set_lineno(node.lineno)
    return node


def _filtered(items: list[Any], name: str, node: nodes.Node) -> nodes.Node:
    made = nodes.Filter(nodes.List(items), name, [], [], None, None)
    assert node.environment is not None  # the parser has set it
    return made.set_environment(node.environment).set_lineno(node.lineno)


def _contained(pair: list[Any]) -> bool:
    """``a in b``, where b may be a text of the template's in which a traced text is looked for."""
    what, where = pair
    if isinstance(what, Traced) and isinstance(where, str) and not isinstance(where, Traced):
        return what.trace.ask(lambda texts: fill(what.parts, texts) in where)
    return what in where


# What traces by itself when its first argument is a text: it calls methods of the text, or hands it on.
_FILTERS = frozenset((
    "trim", "tojson", "join", "length", "count", "default", "d", "items", "list", "first", "last", "map", "select",
    "reject", "selectattr", "rejectattr", "dictsort", "reverse", "sort", "unique", "min", "max", "upper", "lower",
    "capitalize", "replace", "string", "attr", "batch", "slice", "_joined", "_in",
))  # fmt: skip
_TESTS = frozenset((
    "string", "none", "defined", "undefined", "mapping", "iterable", "sequence", "boolean", "number", "integer",
    "float", "callable", "sameas", "eq", "equalto", "==", "ne", "!=", "upper", "lower", "true", "false",
))  # fmt: skip
_COMPARES = frozenset(("eq", "equalto", "==", "ne", "!=", "gt", "ge", "lt", "le", "number", "integer", "defined"))
_HANDS_ON = frozenset(("default", "d", "join", "eq", "equalto", "==", "ne", "!="))


def _watched(name: str, function: Callable[..., Any], known: frozenset[str]) -> Callable[..., Any]:
    """A filter or test that notes when it is given texts of which it would lose sight."""

    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        while values and isinstance(values[0], _PASSED):
            values.pop(0)
        first, rest = (values[0], values[1:]) if values else (None, [])
        lost = isinstance(first, Traced) and name not in known
        lost |= isinstance(first, TracedLength) and name not in _COMPARES
        lost |= name == "string" and not isinstance(first, Traced) and _holds_traced(first)
        lost |= name not in known and _holds_traced(first)
        lost |= name not in _HANDS_ON and _holds_traced((rest, kwargs))
        if lost:
            _current.get().unforeseen.append(name)
        return function(*args, **kwargs)

    return watching


_PASSED = (Environment, Context, EvalContext)  # what Jinja hands to some filters before their values


def _holds_traced(value: Any, level: int = 0) -> bool:
    if isinstance(value, Traced | TracedLength):
        return True
    if level > 4:
        return False
    if isinstance(value, Mapping):
        return any(_holds_traced(part, level + 1) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple) and any(_holds_traced(part, level + 1) for part in value)


def _join_with(jinjas: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's join filter, traced where it can be."""

    @pass_eval_context
    def join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        if attribute is not None or not _holds_traced(items):
            if _holds_traced(items):
                _current.get().unforeseen.append("join by attribute")
            return jinjas(context, items, d, attribute)
        return joined([text for item in items for text in (d, item)][1:])

    return join


def traced_json(value: Any, dumps: Callable[[Any], str], *, as_it_is: bool) -> Any:
    """The JSON of a value with traced texts in it.

    Args:
        value: any JSON value.
        dumps: writes JSON.
        as_it_is: whether it writes characters as they are, rather than in ASCII.
    """
    found: list[Traced] = []

    def marked(part: Any) -> Any:
        if isinstance(part, TracedLength):
            part.text.trace.unforeseen.append("length in JSON")
        if isinstance(part, Traced):
            found.append(part)
            return f"\ufdd7{len(found) - 1}\ufdd8"
        if isinstance(part, Mapping):
            return {marked(key) if isinstance(key, Traced) else key: marked(inner) for key, inner in part.items()}
        return [marked(inner) for inner in part] if isinstance(part, list | tuple) else part

    text = dumps(marked(value))
    if not found:
        return text
    if not as_it_is:
        found[0].trace.unforeseen.append("written in ASCII")
    pieces: list[Any] = []
    for number, piece in enumerate(text.replace("\ufdd8", "\ufdd7").split("\ufdd7")):
        pieces.append(found[int(piece)].in_json() if number % 2 else piece)
    return joined(pieces)
