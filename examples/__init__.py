"""Programs that embed tutti: each runs by itself, `python -m examples.NAME`, on the CPU of a laptop in seconds.

custom_algorithm    a policy gradient of your own, its whole loop in thirty lines
custom_reward       a reward in five lines, used by a job file
custom_environment  an environment of several turns in thirty lines, trained on by the GRPO page
best_of_n           sample, keep the best, imitate it
online_dpo          direct preference optimisation on fresh pairs, generation beside training
tool_use            a policy that may call tools
agent               an agent of the `openai` client with a loop of its own, run by recipes/agent.toml
no_rl               the runtime alone: actors on several processes, nothing about learning
"""
