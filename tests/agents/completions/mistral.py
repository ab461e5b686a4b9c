"""Mistral's calls: a list in JSON behind ``[TOOL_CALLS]``, and since then a name and its arguments."""

from completions.case import Case, Family, Fault, Plain, arguments_of, call, fault
from completions.values import JSON_ARGUMENTS
from toolgym.envs import CallFault

LOOK, CLOCK = '{"name": "look_up", "arguments": {"text": "alpha"}}', '{"name": "clock", "arguments": {}}'
NEW_LOOK, NEW_CLOCK = '[TOOL_CALLS]look_up[ARGS]{"text": "alpha"}', "[TOOL_CALLS]clock[ARGS]{}"
ALPHA = call(text="alpha")
BOTH = (*ALPHA, *call("clock"))


def listed(*entries: str) -> str:
    return f"[TOOL_CALLS][{', '.join(entries)}]"


_CASES = (
    Case("one call in a list", listed(LOOK), calls=ALPHA),
    Case("white space behind the token", f"[TOOL_CALLS] \n[{LOOK}]\n", calls=ALPHA),
    Case("several calls in a list", listed(LOOK, CLOCK), calls=BOTH),
    Case(
        "a call with an id", '[TOOL_CALLS][{"name": "clock", "arguments": {}, "id": "abc123XYZ"}]', calls=call("clock")
    ),
    Case("text before a list", f"One.{listed(LOOK)}", "One.", ALPHA),
    Case("an object instead of a list", f"[TOOL_CALLS]{LOOK}", calls=ALPHA),
    Case("two lists", listed(LOOK) + listed(CLOCK), calls=BOTH),
    Case(
        "a good entry and bad ones",
        listed(LOOK, "7", '{"arguments": {}}', '{"name": "clock", "arguments": [1]}'),
        calls=(*ALPHA, Fault(CallFault.NO_NAME), Fault(CallFault.NO_NAME), Fault(CallFault.BAD_ARGUMENTS, "clock")),
    ),
    Case("an empty list", "[TOOL_CALLS][]", calls=fault(CallFault.NO_NAME)),
    Case(
        "a tool that nobody has", listed('{"name": "fly", "arguments": {"to": "moon"}}'), calls=call("fly", to="moon")
    ),
    Case("no arguments in an entry", listed('{"name": "clock"}'), calls=call("clock")),
    Case("a name that is a number", listed('{"name": 7, "arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("words behind a list", f"{listed(LOOK)} Done.", calls=fault(CallFault.BAD_JSON)),
    Case("a list with a trailing comma", f"[TOOL_CALLS][{LOOK},]", calls=fault(CallFault.BAD_JSON)),
    Case(
        "the token in an argument in a list",
        listed('{"name": "run", "arguments": {"code": "a[TOOL_CALLS]b"}}'),
        calls=call("run", code="a[TOOL_CALLS]b"),
    ),
    Case(
        "the token in plain text in an argument",
        ('[TOOL_CALLS][{"name": "run", "arguments": {"code": "', Plain("[TOOL_CALLS][]"), '"}}]'),
        calls=call("run", code="[TOOL_CALLS][]"),
    ),
    Case(
        "the token of text in an argument",
        listed('{"name": "run", "arguments": {"code": "[INST]"}}'),
        calls=call("run", code="[INST]"),
    ),
    Case("a list that is cut in the name", '[TOOL_CALLS][{"name": "loo', "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "a list that is cut in the arguments",
        '[TOOL_CALLS][{"name": "look_up", "arguments": {"te',
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case(
        "a list that is cut before its bracket",
        f"Yes.[TOOL_CALLS][{LOOK}",
        "Yes.",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case("a list that ended before its bracket", f"[TOOL_CALLS][{LOOK}", "", fault(CallFault.BAD_JSON)),
    Case("one call by name", NEW_LOOK, calls=ALPHA),
    Case("several calls by name", NEW_LOOK + NEW_CLOCK, calls=BOTH),
    Case("a call by name with an id", '[TOOL_CALLS]look_up[CALL_ID]abc123XYZ[ARGS]{"text": "alpha"}', calls=ALPHA),
    Case("a call by name without the second token", '[TOOL_CALLS]look_up{"text": "alpha"}', calls=ALPHA),
    Case("text before a call by name", f"One.\n{NEW_LOOK}", "One.", ALPHA),
    Case("a name and nothing else", "[TOOL_CALLS]clock", calls=fault(CallFault.BAD_JSON, "clock")),
    Case("a name and no arguments", "[TOOL_CALLS]clock[ARGS]", calls=fault(CallFault.BAD_JSON, "clock")),
    Case("arguments and no name", '[TOOL_CALLS][ARGS]{"text": "alpha"}', calls=fault(CallFault.NO_NAME)),
    Case("words behind a call by name", f"{NEW_CLOCK} Done.", calls=fault(CallFault.BAD_JSON, "clock")),
    Case(
        "both tokens in an argument of a call by name",
        '[TOOL_CALLS]run[ARGS]{"code": "[TOOL_CALLS]f[ARGS]{}"}',
        calls=call("run", code="[TOOL_CALLS]f[ARGS]{}"),
    ),
    Case(
        "a bad call by name and a good one",
        f"[TOOL_CALLS]run[ARGS]{{oops{NEW_CLOCK}",
        calls=(Fault(CallFault.BAD_JSON, "run"), *call("clock")),
    ),
    Case("nothing behind the token", "Yes.[TOOL_CALLS]", "Yes.", fault(CallFault.NO_NAME)),
    Case("cut off right behind the token", "Yes.[TOOL_CALLS]", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in the name", "[TOOL_CALLS]loo", "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off in the arguments of a call by name",
        '[TOOL_CALLS]look_up[ARGS]{"te',
        "",
        fault(CallFault.CUT_OFF, "look_up"),
        ended=False,
    ),
    Case(
        "a good call by name and a cut one",
        f"{NEW_CLOCK}[TOOL_CALLS]lo",
        "",
        (*call("clock"), Fault(CallFault.CUT_OFF)),
        ended=False,
    ),
    Case("a whole call by name whose turn was cut", NEW_LOOK, "", ALPHA, ended=False),
    Case("the tokens in plain text are no tokens", (Plain(NEW_LOOK),), NEW_LOOK),
    Case("the second token without the first", "a[ARGS]{}", "a[ARGS]{}"),
    Case("a list without the token is an answer", f"[{LOOK}]", f"[{LOOK}]"),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
)

MISTRAL = Family(
    "mistral",
    None,
    _CASES
    + arguments_of(
        JSON_ARGUMENTS, lambda written: listed(f'{{"name": "look_up", "arguments": {written}}}'), named=False
    )
    + arguments_of(JSON_ARGUMENTS, lambda written: f"[TOOL_CALLS]look_up[ARGS]{written}", named=True, form=", by name"),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "name", "arguments", "id", "abc123XYZ"),
    "mistral",
)
