"""Make the embedded model again, from nothing: its tokenizer and its weights. Seeded; 15 minutes on 2 cores.

    python examples/train_tiny_model.py --out /tmp/tiny

It learns from conversations in which the environments' reference solutions act, rendered by the same `ChatFormat`
that rollouts use; the loss is on the assistant's tokens only. Several conversations are packed behind one system
prompt. Tool calls are made of copying, and two choices decide how soon that is learned (500 steps on random strings:
loss 2.05 without either, 1.34 with the first, 0.06 with both): embeddings as large as what the layers add to them, so
that a token's identity survives, and Muon for the matrices of the layers.
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from toolgym.agents.chat import ChatFormat
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, Message, SystemMessage, Task, ToolEnv, UserMessage
from toolgym.envs.catalog import calculator, ledger
from toolgym.envs.messages import ToolMessage

VOCABULARY = 1_024
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
MUON_PEAK, ADAM_PEAK = 5e-3, 3e-3  # learning rates
# Steps over which the learning rate falls to nothing. Training stops earlier: a model that is let learn to the end
# makes no mistake in Calculator even at temperature 1, and groups without mistakes teach nothing.
SCHEDULE = 1_250
WIDTH = 960  # tokens of a pack
Solve = Callable[[Task, Sequence[Message]], AssistantMessage]


@dataclass(frozen=True)
class Course:
    """One environment to learn, with its reference solution."""

    make: Callable[[], ToolEnv]
    solve: Solve
    share: float


COURSES = (
    Course(lambda: calculator.CalculatorEnv(task_seed=1), calculator.solve, 0.4),
    Course(lambda: ledger.LedgerEnv(task_seed=1), ledger.solve, 0.6),
)


async def converse(env: ToolEnv, solve: Solve, task: Task) -> tuple[Message, ...]:
    """One solved conversation."""
    await env.areset(options={"task": task})
    ended = False
    while not ended:
        _, reward, ended, _, _ = await env.astep(solve(task, env.messages))
    assert reward == 1.0, f"the reference solution failed: {task}"
    return env.messages


def make_tokenizer(texts: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE in which every digit, operator and bracket is a token of its own."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[-+*/()]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = VOCABULARY - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # As in Qwen3: the marks of tools and reasoning are added tokens, but not "special" ones.
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


@dataclass(frozen=True)
class Conversation:
    """A conversation in tokens, behind its opening.

    Attributes:
        system: ids of the part that all conversations of one environment share.
        ids: the rest.
        mask: which of ``ids`` the assistant says.
    """

    system: tuple[int, ...]
    ids: np.ndarray
    mask: np.ndarray


def render(chat: ChatFormat, env: ToolEnv, messages: Sequence[Message], system: tuple[int, ...]) -> Conversation:
    """The conversation as a rollout would record it."""
    ids = chat.open(messages[:2], env.tools.schemas)
    assert tuple(ids[: len(system)]) == system
    mask = [False] * len(ids)
    rest = list(messages[2:])
    while rest:
        said = chat.write(rest.pop(0))
        answers = []
        while rest and isinstance(rest[0], ToolMessage):
            answers.append(rest.pop(0))
        delta = chat.extend(ids, said, answers) if answers else []
        ids += said + delta
        mask += [True] * len(said) + [False] * len(delta)
    return Conversation(system, np.asarray(ids[len(system) :]), np.asarray(mask[len(system) :]))


def common_prefix(one: Sequence[int], two: Sequence[int]) -> tuple[int, ...]:
    """The ids that two prompts begin with."""
    same = next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return tuple(one[:same])


def make_corpus(chat: ChatFormat, count: int) -> list[list[Conversation]]:
    """Conversations by course."""
    corpus = []
    for course in COURSES:
        env = course.make()
        tasks = env.tasks.take(int(count * course.share))
        one, two = (
            chat.open((SystemMessage(env.system_prompt), UserMessage(text)), env.tools.schemas) for text in ("1", "2")
        )
        system = common_prefix(one, two)

        async def all_of(env: ToolEnv = env, course: Course = course, tasks: list[Task] = tasks) -> list:
            return [await converse(env, course.solve, task) for task in tasks]

        corpus.append([render(chat, env, messages, system) for messages in asyncio.run(all_of())])
        lengths = [len(c.ids) for c in corpus[-1]]
        print(f"{type(env).__name__}: {len(tasks)} conversations, system {len(system)}, mean {np.mean(lengths):.0f}")
    return corpus


def pack(rng: np.random.Generator, conversations: Sequence[Conversation]) -> tuple[list[int], list[bool]]:
    """Ids of a system prompt and as many drawn conversations as fit behind it, and which the assistant says."""
    ids = list(conversations[0].system)
    mask = [False] * len(ids)
    while True:
        drawn = conversations[int(rng.integers(len(conversations)))]
        if len(ids) + len(drawn.ids) > WIDTH:
            return ids, mask
        ids += drawn.ids.tolist()
        mask += drawn.mask.tolist()


def collate(rows: Sequence[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B,T), and where the next token is learned (B,T)."""
    width = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    learn = np.zeros((len(rows), width), dtype=bool)
    for row, (one, mask) in enumerate(rows):
        ids[row, : len(one)] = one
        learn[row, : len(one) - 1] = mask[1:]
    return torch.from_numpy(ids), torch.from_numpy(learn)


def loss_of(model: Qwen3ForCausalLM, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next token where it is learned."""
    ids, learn = batch
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    target = torch.roll(ids, -1, dims=1)[learn]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[learn]), target)


def new_model(tokenizer: tokenizers.Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Qwen3's architecture, 1.97 million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4_096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        attn_implementation="sdpa",
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, config.hidden_size**-0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model


def train(
    model: Qwen3ForCausalLM,
    corpus: Sequence[Sequence[Conversation]],
    *,
    steps: int,
    rows: int,
    seed: int,
    out: Path,
) -> None:
    """Train, the learning rate warming up and then falling; short conversations come first."""
    rng = np.random.default_rng(seed)
    shares = np.asarray([course.share for course in COURSES])
    by_length = [sorted(conversations, key=lambda c: len(c.ids)) for conversations in corpus]
    named = dict(model.model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_PEAK, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_PEAK, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    began, means = time.monotonic(), [math.nan] * len(corpus)
    for step in range(steps):
        part = step / SCHEDULE
        share = min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * part)) + 1e-3
        for optimizer, peak in zip(optimizers, (MUON_PEAK, ADAM_PEAK), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        course = int(rng.choice(len(COURSES), p=shares))
        known = int(len(by_length[course]) * min(1.0, 0.3 + 2.0 * part))
        loss = loss_of(model, collate([pack(rng, by_length[course][:known]) for _ in range(rows)]))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        means[course] = loss.item() if math.isnan(means[course]) else 0.95 * means[course] + 0.05 * loss.item()
        if (step + 1) % 25 == 0:
            losses = " ".join(f"{mean:.4f}" for mean in means)
            print(f"step {step + 1} {time.monotonic() - began:.0f}s losses {losses} rate {share:.2f}", flush=True)
        if (step + 1) % 200 == 0:
            save(model, out)


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Weights and configuration, as transformers and vLLM read them."""
    model.config.save_pretrained(out)
    tensors = {k: v.detach().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer: tokenizers.Tokenizer, out: Path) -> None:
    """The tokenizer, as transformers and vLLM read it."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4_096,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text((TINY_MODEL / "chat_template.jinja").read_text())


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--rows", type=int, default=6, help="packs a step")
    parser.add_argument("--conversations", type=int, default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)

    texts = []
    for course in COURSES:
        env = course.make()
        texts += [json.dumps(schema) for schema in env.tools.schemas] * 20
        texts += [task.prompt for task in env.tasks.take(2_000)]
    schema_words = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n</tools>\n\nFor each function call, return a "
        "json object with function name and arguments within  XML tags:\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\nsystem\nuser\nassistant\n'
    )
    spoken = "The result is 1. The balance is 2. ok Error: You keep the accounts. Use the tools. Use the calculator. "
    texts += [schema_words, spoken, *(f' "{name}" {name} {name}.' for name in ledger.NAMES)] * 50
    tokenizer = make_tokenizer(texts)
    save_tokenizer(tokenizer, args.out)
    template = (TINY_MODEL / "chat_template.jinja").read_text()
    chat = ChatFormat.for_tokenizer(tokenizer, template=template)
    corpus = make_corpus(chat, args.conversations)

    model = new_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, corpus, steps=args.steps, rows=args.rows, seed=args.seed, out=args.out)
    save(model, args.out)


if __name__ == "__main__":
    main()
