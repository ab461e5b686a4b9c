"""LFM2's calls: a list of Python calls between two control tokens. LFM2.5 also reasons."""

from completions.case import Case, Family, Fault, Plain, call, fault
from completions.llama import python_cases
from toolgym.envs import CallFault

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
LOOK, CLOCK = f"{START}[look_up(text='alpha')]{END}", f"{START}[clock()]{END}"
ALPHA = call(text="alpha")
BOTH = (*ALPHA, *call("clock"))

_CASES = (
    Case("one call", LOOK, calls=ALPHA),
    Case("several calls in one block", f"{START}[look_up(text='alpha'), clock()]{END}", calls=BOTH),
    Case("several blocks", LOOK + CLOCK, calls=BOTH),
    Case("text before, between and after calls", f"One. {LOOK} Two. {CLOCK} Three.", "One.  Two.  Three.", BOTH),
    Case("white space everywhere", f"{START}\n[ look_up ( text = 'alpha' , ) ]\n{END}", calls=ALPHA),
    Case("a tool that nobody has", f"{START}[fly(to='moon')]{END}", calls=call("fly", to="moon")),
    Case("reasoning, text and a call", f"<think>Hm.</think>Yes.{LOOK}", "Yes.", ALPHA, "Hm."),
    Case("a call in closed reasoning is a draft", f"<think>So {LOOK}</think>No.", "No.", (), f"So {LOOK}"),
    Case(
        "a call in reasoning that never ends",
        f"<think>So {LOOK}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
    ),
    Case(
        "a call in reasoning that the prompt opened",
        f"So {LOOK}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
        prompt="<think>",
    ),
    Case("a call without its list", f"{START}clock(){END}", calls=fault(CallFault.MALFORMED)),
    Case("JSON in a block", f'{START}[{{"name": "clock", "arguments": {{}}}}]{END}', calls=fault(CallFault.NO_NAME)),
    Case("an empty list", f"{START}[]{END}", calls=fault(CallFault.NO_NAME)),
    Case("an empty block", START + END, calls=fault(CallFault.CUT_OFF)),
    Case("words in a block", f"{START}[what now]{END}", calls=fault(CallFault.MALFORMED)),
    Case("words behind the list", f"{START}[clock()] please{END}", calls=fault(CallFault.MALFORMED)),
    Case(
        "an argument without a name", f"{START}[look_up('alpha')]{END}", calls=fault(CallFault.BAD_ARGUMENTS, "look_up")
    ),
    Case(
        "an argument twice", f"{START}[look_up(count=1, count=2)]{END}", calls=fault(CallFault.BAD_ARGUMENTS, "look_up")
    ),
    Case("the closing token in an argument", f"{START}[run(code='a{END}b')]{END}", calls=call("run", code=f"a{END}b")),
    Case(
        "the closing token behind a bracket in an argument",
        f"{START}[run(code='a = [1]{END}')]{END}",
        calls=call("run", code=f"a = [1]{END}"),
    ),
    Case(
        "the opening token in an argument", f"{START}[run(code='a{START}b')]{END}", calls=call("run", code=f"a{START}b")
    ),
    Case(
        "both tokens in plain text in an argument",
        (f"{START}[run(code='", Plain(f"{START}[]{END}"), f"')]{END}"),
        calls=call("run", code=f"{START}[]{END}"),
    ),
    Case(
        "the tags of reasoning as control tokens in an argument",
        f"{START}[run(code='<think>a</think>')]{END}",
        calls=call("run", code="<think>a</think>"),
    ),
    Case("the tokens in plain text are no tokens", (Plain(LOOK),), LOOK),
    Case("two opens and one close", f"{START}[look_up(text='al{CLOCK}", "", (Fault(CallFault.CUT_OFF), *call("clock"))),
    Case("a close without an open", f"Done.{END}", f"Done.{END}"),
    Case("a list without tokens is an answer", "[clock()]", "[clock()]"),
    Case("cut off in the name", f"Yes.{START}[loo", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in an argument", f"{START}[look_up(text='al", "", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off before the closing token", f"{START}[clock()]", "", fault(CallFault.CUT_OFF), ended=False),
    Case("ended without a closing token", f"{START}[clock()]", "", fault(CallFault.CUT_OFF)),
    Case("closed before the bracket", f"{START}[clock(){END}", "", fault(CallFault.CUT_OFF)),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
)

LFM = Family("lfm", "lfm2_2_5", _CASES + python_cases(f"{START}%s{END}"), (START, END, "<think>", "</think>"))
