"""`supertuner init`: from a folder of samples and a machine to a commented configuration that the forecast chose."""
