"""The virtual clock: machines whose time is computed, not waited for."""
