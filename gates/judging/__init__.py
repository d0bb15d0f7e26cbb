"""The framework: what a gate is, who finds, measures and judges it, the ledger, promotion."""
