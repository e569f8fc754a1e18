"""The torch references: each op's spec, its fallback and the oracle of its other providers."""
