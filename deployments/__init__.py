"""How drillcore is run: presets, the demo, and what belongs to one place or another."""
