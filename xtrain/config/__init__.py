"""Configuration: the only part of xtrain, besides pipelines, that knows Hydra.

schema.py    the types of every key
compose.py   YAML and overrides -> RunConfig
bars.py      the bars of phases and runs, whose they are and for which data
plugins.py   what a file may ask of Hydra itself
rules.py     which values make sense, what each device can do
identity.py  fingerprint and axes
messages.py  Hydra's refusals in one line
files.py     where the YAML files are
check.py     a named number and its bar

Nothing is imported here, so that who asks where a file is loads no Hydra.
"""
