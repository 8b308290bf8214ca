"""Where settings come from (files, --set, environment, launchers), and how they become a RunConfig with provenance."""
