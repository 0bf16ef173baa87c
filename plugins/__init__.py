"""The custom operations of DSpark, one module each; see README.md of this folder."""
