"""Where events go: a run's folder, JSON lines, the console. A sink is handed plain data and decides nothing."""
