"""Benchmarks that need GPUs: each module is a program that ends in a short table."""
