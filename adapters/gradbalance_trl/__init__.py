"""Adapter for TRL: GRPO with several rewards, balanced in gradient space. Nothing is public here yet."""

__all__: list[str] = []
