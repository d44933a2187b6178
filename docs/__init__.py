"""Sources of the documentation. `python -m docs.generate` writes what is generated; mkdocs builds the rest."""
