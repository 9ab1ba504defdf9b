"""The search: ILPs over layouts and stages. PuLP is imported in ``solver`` only."""
