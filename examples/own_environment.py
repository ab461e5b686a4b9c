"""An environment of one's own, in one class: find a hidden number. See it run: python examples/own_environment.py."""

from typing import Any

import toolgym.envs as tg


class HotColdEnv(tg.ToolEnv):
    """Find a hidden number between 1 and 100."""

    system_prompt = "Find the hidden number by guessing. Then say it."

    def __init__(self, **options: Any) -> None:
        super().__init__(["Which number is it?"], **options)

    def setup(self, task: tg.Task) -> None:
        """Hide a number; the generator is seeded by reset."""
        self.secret = int(self.np_random.integers(1, 101))

    @tg.tool
    def guess(self, number: int) -> str:
        """Guess the number; you are told whether it is higher or lower."""
        return "found" if number == self.secret else "higher" if number < self.secret else "lower"

    def score(self, episode: tg.Episode) -> float:
        """1 for the right number."""
        return float(tg.last_number(episode.answer or "") == self.secret)


tg.register_env("examples/HotCold-v0", HotColdEnv)

if __name__ == "__main__":
    env = HotColdEnv()
    env.reset(seed=7)
    for number in (50, 75, 88, 95):
        answers, *_ = env.step(tg.AssistantMessage("", (tg.ToolCall("guess", {"number": number}),)))
        print(number, answers[0].content)
    print("reward", env.step(tg.AssistantMessage("It is 95."))[1])
    env.close()
