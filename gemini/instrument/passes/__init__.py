"""The passes, one per file; `base` defines their interface."""
