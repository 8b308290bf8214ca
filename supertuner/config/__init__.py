"""Files, --set and environment become one frozen RunConfig; typos are refused and every value knows its origin."""
