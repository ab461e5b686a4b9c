"""Llama 3's calls: bare JSON, or a bare list of Python calls."""

from completions.case import Case, Family, Fault, Plain, arguments_of, call, fault
from completions.values import JSON_ARGUMENTS, PYTHON_VALUES
from toolgym.envs import CallFault, ToolCall

LOOK = '{"name": "look_up", "parameters": {"text": "alpha"}}'
CLOCK = '{"name": "clock", "parameters": {}}'
ALPHA = call(text="alpha")
BOTH = (*ALPHA, *call("clock"))

_JSON = (
    Case("one call", LOOK, calls=ALPHA),
    Case("white space around a call", f"\n {LOOK} \n", calls=ALPHA),
    Case("arguments instead of parameters", '{"name": "look_up", "arguments": {"text": "alpha"}}', calls=ALPHA),
    Case(
        "the type of function first",
        '{"type": "function", "name": "look_up", "parameters": {"text": "alpha"}}',
        calls=ALPHA,
    ),
    Case("parameters first", '{"parameters": {"text": "alpha"}, "name": "look_up"}', calls=ALPHA),
    Case("the python tag before a call", f"<|python_tag|>{LOOK}", calls=ALPHA),
    Case("text, the python tag and a call", f"Yes. <|python_tag|>{LOOK}", "Yes.", ALPHA),
    Case("the python tag and no parameters", '<|python_tag|>{"name": "clock"}', calls=call("clock")),
    Case("two calls with a semicolon", f"{LOOK}; {CLOCK}", calls=BOTH),
    Case("two calls on two lines", f"{LOOK}\n{CLOCK}", calls=BOTH),
    Case("a list of two calls", f"[{LOOK}, {CLOCK}]", calls=BOTH),
    Case(
        "text before, between and after calls", f"One; {LOOK} Two; {CLOCK} Three; so.", "One;  Two;  Three; so.", BOTH
    ),
    Case("a tool that nobody has", '{"name": "fly", "parameters": {"to": "moon"}}', calls=call("fly", to="moon")),
    Case("an answer in JSON", '{"answer": 4}', '{"answer": 4}'),
    Case("an answer that is a list", "[1, 2]", "[1, 2]"),
    Case("an answer with a name", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    Case("an answer that is a name", '{"name": "Bob"}', '{"name": "Bob"}'),
    Case("an answer with a call in it", f'{{"plan": {LOOK}}}', f'{{"plan": {LOOK}}}'),
    Case("an answer with braces that are no JSON", "f = {x: 1}; g = {y}", "f = {x: 1}; g = {y}"),
    Case("a link", "[a link](http://x)", "[a link](http://x)"),
    Case("a number", "42", "42"),
    Case("words", "I cannot: sorry; bye.", "I cannot: sorry; bye."),
    Case("an answer in JSON and a call", f'{{"answer": 4}} {LOOK}', '{"answer": 4}', ALPHA),
    Case("a brace too many", f"{LOOK}}}", "}", ALPHA),
    Case("no name, but the python tag", '<|python_tag|>{"parameters": {}}', calls=fault(CallFault.NO_NAME)),
    Case("an empty name", '{"name": "", "parameters": {}}', calls=fault(CallFault.NO_NAME)),
    Case("a name that is a number", '{"name": 7, "parameters": {}}', calls=fault(CallFault.NO_NAME)),
    Case(
        "both arguments and parameters",
        '{"name": "look_up", "parameters": {"text": "x"}, "arguments": {"count": 3}}',
        calls=fault(CallFault.BAD_ARGUMENTS, "look_up"),
    ),
    Case("words after the python tag", "<|python_tag|>print(1)", calls=fault(CallFault.MALFORMED)),
    Case("words before and after the python tag", "Yes. <|python_tag|>print(1)", "Yes.", fault(CallFault.MALFORMED)),
    Case("nothing after the python tag", "Yes. <|python_tag|>", "Yes.", fault(CallFault.MALFORMED)),
    Case("the python tag twice", f"<|python_tag|>{LOOK}<|python_tag|>{CLOCK}", calls=BOTH),
    Case("the python tag in plain text", (Plain("<|python_tag|>print(1)"),), "<|python_tag|>print(1)"),
    Case(
        "the python tag as a control token in an argument",
        '{"name": "run", "parameters": {"code": "<|python_tag|>x"}}',
        calls=call("run", code="<|python_tag|>x"),
    ),
    Case(
        "the stop token in plain text in an argument",
        ('{"name": "run", "parameters": {"code": "', Plain("<|eot_id|>"), '"}}'),
        calls=call("run", code="<|eot_id|>"),
    ),
    Case(
        "another control token in an argument",
        '{"name": "run", "parameters": {"code": "<|end_header_id|>"}}',
        calls=call("run", code="<|end_header_id|>"),
    ),
    Case(
        "a whole call in an argument",
        r'{"name": "run", "parameters": {"code": "{\"name\": \"clock\", \"parameters\": {}}"}}',
        calls=call("run", code=CLOCK),
    ),
    Case("cut off in the name", '{"name": "loo', "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off in the parameters",
        '{"name": "look_up", "parameters": {"text": "al',
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case("cut off before the last brace", LOOK[:-1], "", fault(CallFault.CUT_OFF), ended=False),
    Case("ended before the last brace", LOOK[:-1], "", fault(CallFault.BAD_JSON)),
    Case("a good call and a cut one", f'{LOOK}; {{"name": "clo', "", (*ALPHA, Fault(CallFault.CUT_OFF)), ended=False),
    Case(
        "a good call and a bad one",
        f'{LOOK}; {{"name": "clock", "parameters": {{,}}}}',
        "",
        (*ALPHA, Fault(CallFault.BAD_JSON)),
    ),
    Case("an answer that was cut", '{"answer": "al', '{"answer": "al', ended=False),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
    Case("only semicolons", ";;", ";;"),
)

_PYTHON = (
    Case("one call", "[look_up(text='alpha')]", calls=ALPHA),
    Case("two arguments", "[look_up(text='alpha', count=3)]", calls=call(text="alpha", count=3)),
    Case("no arguments", "[clock()]", calls=call("clock")),
    Case("white space everywhere", "\n[ look_up ( text = 'alpha' , ) , clock ( ) , ] \n", calls=BOTH),
    Case("several calls", "[look_up(text='alpha'), clock()]", calls=BOTH),
    Case("the python tag before the list", "<|python_tag|>[clock()]", calls=call("clock")),
    Case("text, the python tag and calls", "Yes. <|python_tag|>[clock()]", "Yes.", call("clock")),
    Case("a name with dots and dashes", "[spotify.play-now(x=1)]", calls=call("spotify.play-now", x=1)),
    Case("a tool that nobody has", "[fly(to='moon')]", calls=call("fly", to="moon")),
    Case("an answer that is a list", "[1, 2]", "[1, 2]"),
    Case("an empty list", "[]", "[]"),
    Case("a link", "[a link](http://x)", "[a link](http://x)"),
    Case("a link with a call in it", "[sin(x)](http://x)", "[sin(x)](http://x)"),
    Case("a list of formulas", "[sin(x), cos(x)]", "[sin(x), cos(x)]"),
    Case("an answer in JSON", '{"answer": 4}', '{"answer": 4}'),
    Case("a call without the list", "clock()", "clock()"),
    Case("text before the list", "I call [clock()]", "I call [clock()]"),
    Case("text after the list", "[clock()] That is all.", calls=fault(CallFault.MALFORMED)),
    Case("two lists", "[clock()]\n[clock()]", calls=fault(CallFault.MALFORMED)),
    Case("an argument without a name", "[look_up('alpha')]", calls=fault(CallFault.BAD_ARGUMENTS, "look_up")),
    Case("an argument twice", "[look_up(count=1, count=2)]", calls=fault(CallFault.BAD_ARGUMENTS, "look_up")),
    Case("arguments in a mapping", "[look_up({'count': 1})]", calls=fault(CallFault.BAD_ARGUMENTS, "look_up")),
    Case("an argument without a value", "[look_up(text=)]", calls=fault(CallFault.MALFORMED, "look_up")),
    Case("a call without parentheses", "[clock(), clock]", calls=fault(CallFault.MALFORMED)),
    Case("a call without a name", "[clock(), (x=1)]", calls=fault(CallFault.NO_NAME)),
    Case("no comma between calls", "[clock() clock()]", calls=fault(CallFault.MALFORMED)),
    Case("no comma between arguments", "[look_up(text='a' count=1)]", calls=fault(CallFault.MALFORMED, "look_up")),
    Case("words after the python tag", "<|python_tag|>print(1)", calls=fault(CallFault.MALFORMED)),
    Case(
        "the python tag as a control token in an argument",
        "[run(code='<|python_tag|>x')]",
        calls=call("run", code="<|python_tag|>x"),
    ),
    Case(
        "another control token in an argument",
        "[run(code='<|end_header_id|>')]",
        calls=call("run", code="<|end_header_id|>"),
    ),
    Case(
        "the stop token in plain text in an argument",
        ("[run(code='", Plain("<|eot_id|>"), "')]"),
        calls=call("run", code="<|eot_id|>"),
    ),
    Case("cut off in the name of the second", "[clock(), loo", "", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in an argument", "[look_up(text='al", "", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off before the bracket", "[clock()", "", fault(CallFault.CUT_OFF), ended=False),
    Case("ended before the bracket", "[clock()", "", fault(CallFault.CUT_OFF)),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
)


def python_value(written: str) -> str:
    """A list of one call with one argument."""
    return f"[look_up(x={written})]"


def python_cases(write: str) -> tuple[Case, ...]:
    """Cases of one argument; ``write`` holds a ``%s`` for a list of Python calls."""
    cases = []
    for value in PYTHON_VALUES:
        refused = isinstance(value.read, CallFault)
        calls = fault(value.read) if refused else (ToolCall("look_up", {"x": value.read}),)
        cases.append(Case(value.name, write % python_value(value.written), calls=calls))
    return tuple(cases)


# What follows a whole value is text here, a brace as well: nothing closes a call.
_WITHIN = tuple(value for value in JSON_ARGUMENTS if value.name != "a brace too many")
LLAMA_JSON = Family(
    "llama-json",
    "llama3_2",
    _JSON + arguments_of(_WITHIN, lambda written: f'{{"name": "look_up", "parameters": {written}}}', named=False),
    ("<|python_tag|>", "name", "arguments", "parameters", "type", "function"),
)
LLAMA_PYTHON = Family("llama-python", "llama3_2", _PYTHON + python_cases("%s"), ("<|python_tag|>",), "python")
