"""The steps of diagonal metrics in single passes over memory."""
