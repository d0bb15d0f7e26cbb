"""Reinforcement learning: groups of rollouts, their advantages, and the batches made of them."""
