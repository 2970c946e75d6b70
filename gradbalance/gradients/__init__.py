"""From losses to rows of per-objective gradients, and back to ``.grad``. Knows no balancing method."""
