"""Hold independent reference implementations that the tests compare the framework with."""
