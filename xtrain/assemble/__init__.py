"""A run made concrete: what it needs, what it is built of, where its weights come from."""
