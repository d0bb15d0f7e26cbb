"""One file a stage, and the command `xtrain` (`pipelines.__main__`)."""

PROGRAM = "xtrain"
