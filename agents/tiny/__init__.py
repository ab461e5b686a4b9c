"""The embedded model: Qwen3's architecture and message format in 2 million parameters. See ``CARD.md``."""

from pathlib import Path

TINY_MODEL = Path(__file__).resolve().parent
