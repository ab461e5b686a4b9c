"""Running code that nobody trusts: boxes in Docker (or, where no engine is, in child processes), and pools of them."""
