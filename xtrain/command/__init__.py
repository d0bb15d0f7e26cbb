"""What every command of the project does alike: its signals, its streams, how it ends."""
