"""Text to ids: GPT-2's, another model's, and the files that carry either."""
