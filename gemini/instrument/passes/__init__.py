"""The passes, one file each; `base` says what a pass is."""
