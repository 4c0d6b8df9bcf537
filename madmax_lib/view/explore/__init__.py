"""What if I turn this knob? Explorers and a canvas of timelines."""
