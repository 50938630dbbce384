"""One user module under context parallelism: hooks, dispatch of its attention calls, DTensors, meshes."""
