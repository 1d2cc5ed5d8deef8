"""The training service: jobs of one trainer and its samplers behind HTTP.

    client --HTTP--> front (auth, jobs, capacity, leases, SQLite) --unix socket--> engine process of the job

The front decides who may do what with which job and keeps what must survive a restart; the engine process
holds the weights, executes, and keeps the outcome of every operation, so that a killed front loses nothing.
Each engine is a process group of its own: what it does to its memory or its GPU stays there.

The package knows no engine: a job's engine is opened by the program that the front starts.
"""
