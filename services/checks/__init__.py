"""Checks of settings, by subject. `settings.check` runs all of them before any process starts."""
