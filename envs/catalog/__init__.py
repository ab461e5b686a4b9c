"""The environments that ship with Toolgym, each a file of its own; `toolgym.envs` registers them."""
