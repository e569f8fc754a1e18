"""Training of the packaged demo model. Not part of the installed package."""
