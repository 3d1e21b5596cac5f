"""A reward of your own, in five lines. A job file names it, and the workers import it:

    [reward]
    verifier = "examples.custom_reward:short_and_right"

or as a part of a sum, beside others:

    [reward.parts.right]
    verifier = "task"
    [reward.parts.short]
    verifier = "examples.custom_reward:short_and_right"
    weight = 0.2

    python -m runtime.launch reward.verifier=examples.custom_reward:short_and_right steps=3
"""

# --8<-- [start:reward]
from roles.types import Prompt
from roles.verify import by_task, verdict


def short_and_right(prompt: Prompt, text: str) -> float:
    return verdict(by_task(prompt, text)).value / (1 + len(text) / 100)


# --8<-- [end:reward]
