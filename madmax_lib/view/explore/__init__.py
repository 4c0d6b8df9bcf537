"""What if I turn this knob? Explorers, canvas, Perfetto."""
