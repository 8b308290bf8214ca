"""A model family with three experts, for tests: what somebody adds who brings such a model."""
