"""`Traced`: text that remembers where it came from while a template works on it.

A template is rendered with traced texts in the place of real ones. What comes out says which text stands where and
what the template did to it on the way (stripped it, wrote it as JSON); and every question that the template asked about
a text (whether it contains, begins with, ends with or equals another, how long it is) is noted with its usual answer.
That holds for any text for which the questions have the same answers. Whatever else a template does with a text cannot
be foreseen: that is noted as well, and then each text is rendered by itself.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_USUAL = "x"  # stands for a text where a question is asked: one without anything special in it


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
        questions: asked about texts.
        unforeseen: what a template did that cannot be foreseen for other texts.
    """

    questions: list[Question] = field(default_factory=list)
    unforeseen: list[str] = field(default_factory=list)


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
        made = super().__new__(cls, "\ufdd5traced\ufdd6")
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
            same = self.parts == other.parts
            others = other.parts
            self.trace.questions.append(Question(lambda t: (fill(self.parts, t) == fill(others, t)) is same, True))
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
        return self.note(lambda texts: ask(fill(self.parts, texts)))

    def note(self, ask: Callable[[Mapping[Any, str]], bool]) -> bool:
        """Note a question; its usual answer."""
        answer = ask(_Usual())
        self.trace.questions.append(Question(ask, answer))
        return answer

    def _unforeseen(self, what: str) -> str:
        self.trace.unforeseen.append(what)
        return fill(self.parts, _Usual())


class TracedLength(int):
    """The length of a traced text: comparisons with it are noted as questions."""

    text: Traced

    def __lt__(self, other: int) -> bool:
        return self.text.note(lambda texts: len(fill(self.text.parts, texts)) < other)

    def __le__(self, other: int) -> bool:
        return self.text.note(lambda texts: len(fill(self.text.parts, texts)) <= other)

    def __gt__(self, other: int) -> bool:
        return not self <= other

    def __ge__(self, other: int) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        return self.text.note(lambda texts: len(fill(self.text.parts, texts)) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True

    __hash__ = int.__hash__


def traced_length(value: Any) -> int:
    """The length of anything, as Jinja's filter has it."""
    if not isinstance(value, Traced):
        return len(value)
    length = TracedLength(len(fill(value.parts, _Usual())))
    length.text = value
    return length


class _Usual(dict[Any, str]):
    def __missing__(self, key: Any) -> str:
        return _USUAL


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
    own |= {"__subclasshook__", "__doc__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__repr__", "__sizeof__"}
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
        return "".join(pieces)
    parts: list[str | Slot] = []
    for piece in pieces:
        if isinstance(piece, Traced):
            parts += piece.parts
            continue
        if "\ufdd5" in piece:
            trace.unforeseen.append("went through something that does not trace")
        parts.append(piece)
    return Traced(parts, trace)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment in which joined texts stay traced. Templates must be compiled by `from_tree`."""

    concat = staticmethod(joined)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["join"] = _join
        self.filters["_joined"] = joined
        self.filters["length"] = self.filters["count"] = traced_length

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
    if not isinstance(node, nodes.Concat):
        return node
    items = nodes.List(list(node.nodes))
    made = nodes.Filter(items, "_joined", [], [], None, None)
    assert node.environment is not None  # the parser has set it
    return made.set_environment(node.environment).set_lineno(node.lineno)


def _join(value: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
    """Jinja's join filter, traced."""
    items = [item if attribute is None else item[attribute] for item in value]
    separated = [text for item in items for text in (d, item)]
    return joined(separated[1:])


def traced_json(value: Any, dumps: Callable[[Any], str], *, as_it_is: bool) -> Any:
    """The JSON of a value with traced texts in it.

    Args:
        value: any JSON value.
        dumps: writes JSON.
        as_it_is: whether it writes characters as they are, rather than in ASCII.
    """
    found: list[Traced] = []

    def marked(part: Any) -> Any:
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


__all__: Sequence[str] = ("Parts", "Question", "Slot", "Trace", "Traced", "TracingEnvironment", "fill", "traced_json")
