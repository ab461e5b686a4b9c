"""Which syntax a model speaks: found by reading back what its own template has written."""

from collections.abc import Callable

from toolgym.agents.calls.deepseek_calls import DeepSeekCalls
from toolgym.agents.calls.json_calls import HermesCalls, LlamaCalls, MistralCalls
from toolgym.agents.calls.literal_calls import GemmaCalls, LfmCalls, PythonCalls
from toolgym.agents.calls.syntax import CallSyntax, Mark
from toolgym.agents.calls.tagged_calls import GlmCalls, XmlCalls

# From those that are told by their markers to those that are bare text.
SYNTAXES: dict[str, Callable[[Mark], CallSyntax]] = {
    made.name: made
    for made in (
        GemmaCalls,
        DeepSeekCalls,
        MistralCalls,
        XmlCalls,
        GlmCalls,
        HermesCalls,
        LfmCalls,
        LlamaCalls,
        PythonCalls,
    )
}
