"""The optimizer Automagic: one learning rate per weight, stored in 10 bits."""
