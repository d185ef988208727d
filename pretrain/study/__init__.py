"""Train methods at several lengths, and judge the published claims by the results."""
