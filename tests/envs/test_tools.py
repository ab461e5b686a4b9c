"""What an author of tools is promised: schemas from hints and docstrings, checked arguments, clear refusals."""

import enum
import functools
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgym.envs import ConfigurationError, Tool, ToolError, Toolset, tool
from toolgym.envs.tools import ToolOptions


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(pydantic.BaseModel):
    x: int
    y: int


def paint(
    colour: Colour, at: Point, layers: Annotated[int, pydantic.Field(ge=1)] = 1, mode: Literal["a", "b"] = "a"
) -> str:
    """Paint a point.

    It dries at once.

    Args:
        colour: which paint.
        at: where.
    """
    return f"{colour.value} {at.x},{at.y} {layers} {mode}"


def test_the_schema_comes_from_hints_and_docstring() -> None:
    function = Tool(paint).schema["function"]
    assert function["name"] == "paint"
    assert function["description"] == "Paint a point.\n\nIt dries at once."
    properties = function["parameters"]["properties"]
    assert list(properties) == ["colour", "at", "layers", "mode"]
    assert properties["colour"]["description"] == "which paint."
    assert properties["layers"]["minimum"] == 1
    assert properties["mode"]["enum"] == ["a", "b"]
    assert function["parameters"]["required"] == ["colour", "at"]


def test_arguments_are_coerced_to_their_types() -> None:
    checked = Tool(paint).validate({"colour": "red", "at": {"x": "3", "y": 4}, "layers": "2"})
    assert checked == {"colour": Colour.RED, "at": Point(x=3, y=4), "layers": 2, "mode": "a"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"at": {"x": 1, "y": 2}}, "colour: Field required"),
        ({"colour": "green", "at": {"x": 1, "y": 2}}, "colour: Input should be 'red' or 'blue'"),
        ({"colour": "red", "at": {"x": "one", "y": 2}}, "at.x: Input should be a valid integer"),
        ({"colour": "red", "at": {"x": 1, "y": 2}, "layers": 0}, "layers: Input should be greater than or equal to 1"),
        ({"colour": "red", "at": {"x": 1, "y": 2}, "gloss": True}, "gloss: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_named_in_words_for_the_model(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolError, match="Invalid arguments for paint") as caught:
        Tool(paint).validate(arguments)
    assert said in str(caught.value)
    assert "Expected arguments: colour, at, layers, mode." in str(caught.value)


def test_arguments_that_are_no_object_are_refused_in_words() -> None:
    with pytest.raises(ToolError, match="expected a JSON object, got 'red'"):
        Tool(paint).validate("red")  # type: ignore[arg-type]


def test_parameters_may_have_any_name() -> None:
    def odd(json: int, copy: str, model_config: int, self_: int = 0) -> int:
        return json

    assert Tool(odd).validate({"json": 1, "copy": "c", "model_config": 2}) == {
        "json": 1,
        "copy": "c",
        "model_config": 2,
        "self_": 0,
    }


def _no_hint(x) -> int:  # type: ignore[no-untyped-def]
    return 0


def _star(*args: int) -> int:
    return 0


def _double_star(**kwargs: int) -> int:
    return 0


def _positional(x: int, /) -> int:
    return x


def _no_schema(x: "object | type[int]", y: "ToolRunnerThatIsNot") -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


class _Opaque:
    pass


def _opaque(x: _Opaque) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_no_hint, r"parameter 'x' has no type hint; annotate it"),
        (_star, r"parameter 'args' is variadic positional"),
        (_double_star, r"parameter 'kwargs' is variadic keyword"),
        (_positional, r"parameter 'x' is positional-only"),
        (_no_schema, r"a type hint cannot be resolved"),
        (_opaque, r"an argument's type has no schema"),
    ],
)
def test_a_function_that_makes_no_tool_is_refused_with_the_reason(function: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Tool(function)


def test_pydantic_fields_say_more_about_arguments() -> None:
    def grade(
        n: int = pydantic.Field(3, ge=1), why: Annotated[str, pydantic.Field(description="a reason")] = ""
    ) -> str:
        return f"{n} {why}"

    made = Tool(grade)
    assert made.validate({}) == {"n": 3, "why": ""}
    assert made.schema["function"]["parameters"]["properties"]["why"]["description"] == "a reason"
    with pytest.raises(ToolError, match="n: Input should be greater than or equal to 1"):
        made.validate({"n": 0})


class Callable_:
    """A callable object."""

    async def __call__(self, x: int) -> int:
        """Take x."""
        return x


def test_partials_and_callable_objects_are_tools() -> None:
    partial = Tool(functools.partial(paint, mode="b"))
    assert partial.name == "paint"
    assert partial.validate({"colour": "red", "at": {"x": 1, "y": 2}})["mode"] == "b"
    made = Tool(Callable_(), ToolOptions(name="take"))
    assert (made.name, made.is_async, made.description) == ("take", True, "Take x.")
    assert made.validate({"x": "3"}) == {"x": 3}


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two tools are named 'paint'"):
        Toolset([paint, paint])


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_must_be_above_zero(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="expected a tool timeout above 0"):
        tool(timeout=seconds)


class Base:
    @tool
    def inherited(self) -> int:
        """From the base."""
        return 1

    @tool
    def replaced(self) -> int:
        return 1

    @tool
    def dropped(self) -> int:
        return 1

    def close(self) -> None:
        raise AssertionError("never a tool")

    @property
    def trap(self) -> int:
        raise AssertionError("properties are not run to look for tools")


class Derived(Base):
    @tool(name="renamed", ends_episode=True)
    def own(self) -> int:
        return 2

    @tool
    def replaced(self) -> int:
        return 2

    def dropped(self) -> int:
        return 2

    @staticmethod
    @tool
    def loose(x: int) -> int:
        return x

    @tool
    @staticmethod
    def upside_down(x: int) -> int:
        return x

    @tool
    @classmethod
    def of_class(cls, x: int) -> int:
        return x


def test_only_marked_methods_are_tools() -> None:
    found = Toolset.of(Derived())
    assert list(found) == ["inherited", "replaced", "renamed", "loose", "upside_down", "of_class"]
    assert found["replaced"].function() == 2
    assert found["renamed"].options.ends_episode


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
def test_any_json_object_is_checked_or_refused_never_anything_else(arguments: dict[str, Any]) -> None:
    try:
        checked = Tool(paint).validate(arguments)
    except ToolError:
        return
    assert set(checked) == {"colour", "at", "layers", "mode"}
