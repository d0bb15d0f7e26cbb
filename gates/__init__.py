"""Executable claims: one file a phase, run or milestone, judged against the bars in conf/."""
