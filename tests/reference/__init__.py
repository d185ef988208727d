"""Independent references that the tests compare the framework with."""
