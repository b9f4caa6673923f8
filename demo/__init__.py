"""The main job on real input: code-repair tasks made from real releases, rolled out and graded in sandboxes."""
