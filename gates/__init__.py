"""Executable claims: one file a gate, judged against the bars in conf/."""
