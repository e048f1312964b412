"""Products with a weight: the checked problem, the configurations, the plans."""
