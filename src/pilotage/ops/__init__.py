"""Operations on runs: what a person reads. Nothing here trains or changes a run's state."""
