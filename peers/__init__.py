"""Programs of other frameworks that do our work: what benchmarks and gates compare with."""
