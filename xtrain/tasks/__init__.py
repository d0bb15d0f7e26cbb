"""What post-training is about: problems, their answers, and rewards; each task one file."""
