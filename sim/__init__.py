"""The model: ranks, ports, messages and block writes of the connector, simulated. Rooms from the bottom up: `cache`, `kernel`,
`releases`, `scenario`, `moriio`, `results`, `search`, `commands`.
"""
