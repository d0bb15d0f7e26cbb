"""`xtrain-report`: the evolution of runs and phases, in words and plots."""
