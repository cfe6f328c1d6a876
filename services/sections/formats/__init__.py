"""How each family of models writes tool calls: one file each. The table of them is `services.sections.tools`."""
