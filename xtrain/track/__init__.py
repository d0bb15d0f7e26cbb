"""What a run leaves behind: its directory, how it is resumed, its mirror in MLflow."""
