"""Memory that all processes of a node map, as files of one checked format (docs/formats.md)."""
