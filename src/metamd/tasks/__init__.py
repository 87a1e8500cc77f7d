"""Families of training problems."""

from metamd.tasks.base import Config, Evaluation, Split, Task, TaskFamily

__all__ = ["Config", "Evaluation", "Split", "Task", "TaskFamily"]
