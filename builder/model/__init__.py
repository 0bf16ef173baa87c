"""The networks, defined once as rank-local torch modules; see README.md of this folder."""
