"""Sandsea as the sandbox of agent frameworks. Each module imports its framework; this package imports none.

`inspect` is found by inspect-ai itself (`sandbox="sandsea"`); `harbor` and `mini` are named by their users, as
`sandsea.adaptors.harbor:SandseaEnvironment` and `sandsea.adaptors.mini.SandseaEnvironment`.
"""
