"""What runs on ranks: trainers, rollout engines, rewards, prompts, evaluation.

Protocols stand above their implementations. Imports go one way: roles -> sync -> runtime; roles never import algorithms
(a loss reaches a trainer rank by name, see `roles.objective`).
"""
