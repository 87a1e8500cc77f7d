"""The same tasks for everybody: training, tuning, statistics, figures, pages."""
