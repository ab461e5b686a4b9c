"""``toolgym template``: what a model's chat template can do, proven."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

from toolgym.agents.certificate import Certificate, Verdict
from toolgym.agents.chat import load_chat_format
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import ConfigurationError
from toolgym.rollout.options import parse_options
from toolgym.rollout.viewer import draw, plain

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Chat templates.")
_STYLES = {Verdict.EXACT: "green", Verdict.KEEPS: "yellow", Verdict.REFUSED: "bold red"}


@app.callback()
def template() -> None:
    """Chat templates."""


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A model folder, or 'tiny' for the embedded model.")],
    family: Annotated[str | None, typer.Option(help="Of the renderers library, e.g. qwen3.")] = None,
    call_syntax: Annotated[str | None, typer.Option(help="Of the model's calls, if it cannot be found out.")] = None,
    chat_option: Annotated[
        list[str] | None, typer.Option(help="An option of the template, as name=JSON, e.g. enable_thinking=false.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw what is printed into this file.")] = None,
) -> None:
    """Run the probes of the certificate on a model's tokenizer and chat template, and print what they have shown.

    Ends with 0; with 1 if anything is refused, and with 2 if there is nothing to run them on.
    """
    folder = TINY_MODEL if model == "tiny" else Path(model)
    options = parse_options(chat_option or [], "--chat-option")
    chat = load_chat_format(folder, family=family, syntax=call_syntax, options=options)
    certificate = chat.certificate
    if certificate is None:
        raise ConfigurationError(f"{chat.name} draws up no certificate")
    stops = ", ".join(chat.decode([token]) for token in chat.stop_token_ids)
    facts = [f"calls: {certificate.call_syntax}", f"turns end with: {stops}"]
    facts += [f"options: {', '.join(chat_option)}"] if chat_option else []
    console = Console(record=svg is not None)
    console.print(
        Panel(Group(*(plain(fact) for fact in facts)), title=plain(certificate.chat_format), title_align="left"),
        certificate_table(certificate),
    )
    if svg is not None:
        draw(console, svg, f"toolgym template check {model}")
    raise typer.Exit(1 if certificate.refused else 0)


def certificate_table(certificate: Certificate) -> Table:
    """A certificate as a table, a probe a row."""
    table = Table("probe", "what it plays", "result", "what is kept, or why not")
    for finding in certificate.findings:
        verdict = plain(finding.verdict.value, _STYLES[finding.verdict])
        table.add_row(finding.probe, plain(finding.about), verdict, plain("\n".join(finding.notes)))
    return table
